"""Holds the table of all options. Add a new option to the `table_*.py` module of its topic and nowhere else."""

from __future__ import annotations

from npu_bridge.options import table_compiler, table_device, table_observation, table_precision, table_training
from npu_bridge.options.table import OptionTable

OPTIONS = OptionTable(
    (
        *table_training.OPTIONS,
        *table_precision.OPTIONS,
        *table_compiler.OPTIONS,
        *table_observation.OPTIONS,
        *table_device.OPTIONS,
    )
)
