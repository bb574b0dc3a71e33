"""Options that switch TensorFlow's own graph rewriting, or say where variables live."""

from __future__ import annotations

import logging
from typing import Any

import tensorflow as tf
from tensorflow.core.protobuf.rewriter_config_pb2 import RewriterConfig

from npu_bridge.graph.variables import VARIABLE_TYPES
from npu_bridge.options import TrainingOptions
from npu_bridge.options.errors import say_once

_HOST = "/device:CPU:0"


def set_rewrites(options: TrainingOptions, session_config: Any) -> None:
    """Sets the switches of TensorFlow's rewriter that options ask for, in the settings given."""
    if not options.oo_constant_folding:
        graph_options = session_config.graph_options
        graph_options.rewrite_options.constant_folding = RewriterConfig.OFF
        # Constants are folded a second time when the graph is prepared for its executor, at every level above L0;
        # the rewriter's other passes do not depend on the level (seen with TensorFlow 2.15).
        graph_options.optimizer_options.opt_level = tf.compat.v1.OptimizerOptions.L0


def variables_on_host(op: tf.Operation) -> str:
    """A device function: variables on the CPU, everything else where it is."""
    return _HOST if op.type in VARIABLE_TYPES else op.device


def check_placement(options: TrainingOptions, graph: tf.Graph) -> None:
    """Says so when variables were to live on the host and the graph has them elsewhere already."""
    if options.variable_placement != "Host":
        return
    elsewhere = [op.name for op in graph.get_operations() if op.type in VARIABLE_TYPES and "CPU" not in op.device]
    if elsewhere and tf.config.list_physical_devices("GPU"):
        say_once(
            logging.WARNING,
            f"variable_placement: the graph was built before the session knew. Expected variables on "
            f"{_HOST}; got {len(elsewhere)} elsewhere, {elsewhere[0]!r} among them. Give the option to "
            f"NPURunConfig, or build the variables under tf.device({_HOST!r}).",
        )
