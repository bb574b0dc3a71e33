"""Declares all options once, in a table, and derives constructors, checks, readers and a page from this table.

`read_run_config` and `read_session_config` return the immutable `TrainingOptions`, from which all other code takes its
settings. Names are imported on first use, because the launcher and its ranks need few of them.
"""

from npu_bridge.base.lazy import lazy_getattr

_PLACES = {
    "AccelerateTrainMode": "npu_bridge.options.grammar:AccelerateTrainMode",
    "JobStart": "npu_bridge.options.job_start:JobStart",
    "OPTIONS": "npu_bridge.options.catalogue:OPTIONS",
    "TrainingOptions": "npu_bridge.options.training_options:TrainingOptions",
    "parameter_values": "npu_bridge.options.reading:parameter_values",
    "parse_accelerate_train_mode": "npu_bridge.options.grammar:parse_accelerate_train_mode",
    "read_job_start": "npu_bridge.options.job_start:read_job_start",
    "read_run_config": "npu_bridge.options.reading:read_run_config",
    "read_session_config": "npu_bridge.options.reading:read_session_config",
    "make_session_config": "npu_bridge.options.reading:make_session_config",
    "announce_ineffective_options": "npu_bridge.options.reading:announce_ineffective_options",
    "with_optimizer_entry": "npu_bridge.options.reading:with_optimizer_entry",
}

__all__ = list(_PLACES)
__getattr__ = lazy_getattr(__name__, _PLACES)
