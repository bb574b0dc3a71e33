"""Builds session settings option by option."""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from npu_bridge.options.reading import with_optimizer_entry

__all__ = ["SessionConfigBuilder"]


class SessionConfigBuilder:
    """A builder of session settings with an `NpuOptimizer` entry, whose options a script sets one by one.

    Attributes:
      session_config: the ConfigProto for the session.
      parameter_map: the options of the `NpuOptimizer` entry, for example `parameter_map["dump_step"].s = b"0"`.

    Args:
      config: a ConfigProto to copy, which stays unchanged; None starts from an empty ConfigProto.
    """

    def __init__(self, config: Any = None):
        self.session_config: tf.compat.v1.ConfigProto = with_optimizer_entry(config, {})
        self.parameter_map = self.session_config.graph_options.rewrite_options.custom_optimizers[-1].parameter_map
