from __future__ import annotations

import pytest
import tensorflow as tf

from npu_bridge.base import environment
from npu_bridge.options import environment_table


@pytest.fixture(autouse=True)
def quiet_environment(monkeypatch):
    """No variable of a launcher or of the documentation is set."""
    for variable in environment_table.VARIABLES:
        monkeypatch.delenv(variable.name, raising=False)
    for names in environment._LAUNCHERS:
        for name in names:
            monkeypatch.delenv(name, raising=False)


def slots(*entries):
    """Session settings whose entry holds values in slots: (key, slot, value)."""
    config = tf.compat.v1.ConfigProto()
    entry = config.graph_options.rewrite_options.custom_optimizers.add(name="NpuOptimizer")
    for key, slot, value in entries:
        setattr(entry.parameter_map[key], slot, value)
    return config
