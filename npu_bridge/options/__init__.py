"""All options, declared once in a table, and what is generated from it: constructors, checks, readers and a page.

`read_run_config` and `read_session_config` give the immutable `TrainingOptions` that engines take their
settings from; `environment` is the only module of the package that touches environment variables.
"""

from npu_bridge.options.catalogue import OPTIONS
from npu_bridge.options.grammar import AccelerateTrainMode, parse_accelerate_train_mode
from npu_bridge.options.job_start import JobStart, read_job_start
from npu_bridge.options.reading import (
    parameter_values,
    read_run_config,
    read_session_config,
    session_config_of,
    with_entry,
)
from npu_bridge.options.training_options import TrainingOptions

__all__ = [
    "AccelerateTrainMode",
    "JobStart",
    "OPTIONS",
    "TrainingOptions",
    "parameter_values",
    "parse_accelerate_train_mode",
    "read_job_start",
    "read_run_config",
    "read_session_config",
    "session_config_of",
    "with_entry",
]
