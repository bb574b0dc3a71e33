"""Builds session settings by keys."""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from npu_bridge.options.reading import with_entry

__all__ = ["SessionConfigBuilder"]


class SessionConfigBuilder:
    """Session settings with an `NpuOptimizer` entry whose options are filled in one by one.

    Attributes:
      session_config: the ConfigProto to make a session with.
      parameter_map: the options of the entry, as scripts write them: `parameter_map["dump_step"].s = b"0"`.

    Args:
      config: a ConfigProto, left unchanged; None for an empty one.
    """

    def __init__(self, config: Any = None):
        self.session_config: tf.compat.v1.ConfigProto = with_entry(config, {})
        self.parameter_map = self.session_config.graph_options.rewrite_options.custom_optimizers[-1].parameter_map
