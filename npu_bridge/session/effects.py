"""Applies options to a session: changes its ConfigProto, makes hooks for its runs, sets the seed of its graph."""

from __future__ import annotations

from typing import Any

import tensorflow as tf
from tensorflow.core.protobuf.rewriter_config_pb2 import RewriterConfig

from npu_bridge.base.tf_internals.sessions import default_session_config
from npu_bridge.options import TrainingOptions
from npu_bridge.options.reading import ENTRY_NAME
from npu_bridge.session import determinism
from npu_bridge.session.devices import choose_devices
from npu_bridge.session.dump_hook import DumpHook
from npu_bridge.session.overflow_hook import OverflowHook
from npu_bridge.session.profiling import ProfilingHook
from npu_bridge.session.tailing_hook import TailingHook


def has_entry(session_config: Any) -> bool:
    """Returns whether session settings hold an `NpuOptimizer` entry: the mark of code written for this interface."""
    if not isinstance(session_config, tf.compat.v1.ConfigProto):
        return False
    optimizers = session_config.graph_options.rewrite_options.custom_optimizers
    return any(entry.name == ENTRY_NAME for entry in optimizers)


def prepare_session_config(options: TrainingOptions, session_config: Any = None) -> Any:
    """Makes the ConfigProto with which a session gets the effects of options.

    It lacks the `NpuOptimizer` entries, which name a plug-in TensorFlow does not have. It has soft placement, because
    scripts of this interface place operators on devices this machine may lack, and the settings of single options.
    Everything else stays, `log_device_placement` and the rewriter's switches included.
    """
    prepared = tf.compat.v1.ConfigProto()
    if session_config is not None:
        prepared.CopyFrom(session_config)
    optimizers = prepared.graph_options.rewrite_options.custom_optimizers
    others = [entry for entry in optimizers if entry.name != ENTRY_NAME]
    del optimizers[:]
    optimizers.extend(others)
    if options.use_off_line:
        prepared.allow_soft_placement = True
        if not options.oo_constant_folding:
            _switch_constant_folding_off(prepared.graph_options)
        choose_devices(options, prepared)
    return prepared


def hooks_for(options: TrainingOptions, graph_name: str | None = None, folder: str | None = None) -> list:
    """Makes the hooks of a session's options: tail optimisation, dumps, overflow detection, profiling.

    Pass them to `close_hooks` at the end, as a MonitoredSession that fails does not end its hooks.

    Args:
      options: the options of the run.
      graph_name: name of the graph in dumps; by default the first thing a run fetches.
      folder: folder of the reports; None writes none.
    """
    if not options.use_off_line:
        return []
    hooks: list = [TailingHook(folder)] if options.is_tailing_optimization else []
    if options.enable_dump:
        hooks.append(DumpHook(options, graph_name))
    if options.enable_dump_debug:
        hooks.append(OverflowHook(options, graph_name))
    if options.enable_profiling:
        hooks.append(ProfilingHook(options))
    return hooks


def close_hooks(hooks: list) -> None:
    """Closes what hooks have open; does nothing for hooks that have ended."""
    for hook in hooks:
        hook.end(None)


def prepare_graph(options: TrainingOptions, graph: tf.Graph, *, is_of_one_run: bool) -> None:
    """Applies options to a graph: with `deterministic`, a graph without a seed gets a fixed one.

    With `is_of_one_run` all its sessions belong to this run, and all run deterministically.
    """
    if options.use_off_line and options.deterministic == 1:
        determinism.give_seed(options, graph)
        if is_of_one_run:
            determinism.mark(graph)


def settle_session(session: tf.compat.v1.Session, options: TrainingOptions | None = None) -> None:
    """Applies options to a session that has run nothing yet: deterministic kernels, if asked for.

    Without options (None) a session follows its graph.
    """
    is_asked = options is not None and options.use_off_line and options.deterministic == 1
    if is_asked or (options is None and determinism.is_marked(getattr(session, "graph", None))):
        determinism.run_deterministically(session)


def placed_softly(session_config: Any, is_interactive: bool = False) -> tf.compat.v1.ConfigProto:
    """Copies session settings and turns on soft placement: an operator whose device is missing runs on another.

    For None it copies TensorFlow's defaults, which differ for an `InteractiveSession`.
    """
    copied = tf.compat.v1.ConfigProto()
    if session_config is not None:
        copied.CopyFrom(session_config)
    elif is_interactive:
        copied.gpu_options.allow_growth = True  # as in TF 2.15
    else:
        copied.CopyFrom(default_session_config())  # as in TF 2.15
    copied.allow_soft_placement = True
    return copied


def _switch_constant_folding_off(graph_options):
    graph_options.rewrite_options.constant_folding = RewriterConfig.OFF
    # TensorFlow folds constants again when it prepares the graph for its executor, at every level above L0;
    # the rewriter's other passes do not depend on the level (seen with TensorFlow 2.15).
    graph_options.optimizer_options.opt_level = tf.compat.v1.OptimizerOptions.L0
