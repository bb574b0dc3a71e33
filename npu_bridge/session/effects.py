"""Applies options to a session: changes its ConfigProto, makes hooks for its runs and sets the seed of its graph."""

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
from npu_bridge.session.tailing_hook import TailOptimizationHook


def has_optimizer_entry(session_config: Any) -> bool:
    """Returns whether session settings hold an `NpuOptimizer` entry, by which code for this interface is recognized."""
    if not isinstance(session_config, tf.compat.v1.ConfigProto):
        return False
    optimizers = session_config.graph_options.rewrite_options.custom_optimizers
    return any(entry.name == ENTRY_NAME for entry in optimizers)


def prepare_session_config(options: TrainingOptions, session_config: Any = None) -> Any:
    """Returns a copy of session settings (a ConfigProto) with the effects of options.

    The copy has no `NpuOptimizer` entries, as TensorFlow has no such plug-in. It has soft placement, because scripts of
    this interface place operators on devices that this machine can lack. The options set its devices and
    constant folding. Everything else stays, including `log_device_placement` and the rewriter's switches.
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
    """Makes the hooks that a session's options need: for tail optimisation, dumps, overflow detection and profiling.

    Pass the hooks to `close_hooks` at the end, as a MonitoredSession that fails does not call their `end`.

    Args:
      options: the options of the run.
      graph_name: name of the graph in dumps; by default the name of the first element that a run fetches.
      folder: folder of the reports; None writes no reports.
    """
    if not options.use_off_line:
        return []
    hooks: list = [TailOptimizationHook(folder)] if options.is_tailing_optimization else []
    if options.enable_dump:
        hooks.append(DumpHook(options, graph_name))
    if options.enable_dump_debug:
        hooks.append(OverflowHook(options, graph_name))
    if options.enable_profiling:
        hooks.append(ProfilingHook(options))
    return hooks


def close_hooks(hooks: list) -> None:
    """Calls the `end` of hooks, which closes their files; no effect on hooks that have already ended."""
    for hook in hooks:
        hook.end(None)


def prepare_graph(options: TrainingOptions, graph: tf.Graph, *, belongs_to_this_run: bool) -> None:
    """Applies options to a graph: with `deterministic`, gives a fixed seed to a graph without a seed.

    With `belongs_to_this_run` all sessions of the graph belong to this run, and are made deterministic.
    """
    if options.use_off_line and options.deterministic == 1:
        determinism.seed_graph(options, graph)
        if belongs_to_this_run:
            determinism.mark_deterministic(graph)


def apply_determinism(session: tf.compat.v1.Session, options: TrainingOptions | None = None) -> None:
    """Makes a session that has run nothing yet use deterministic kernels, if the option `deterministic` is on.

    Without options (None) it does so if the session's graph is marked as deterministic.
    """
    is_asked = options is not None and options.use_off_line and options.deterministic == 1
    if is_asked or (options is None and determinism.is_marked_deterministic(getattr(session, "graph", None))):
        determinism.run_deterministically(session)


def placed_softly(session_config: Any, is_interactive: bool = False) -> tf.compat.v1.ConfigProto:
    """Copies session settings and turns on soft placement: an operator whose device is missing runs on another device.

    Without settings (None) it copies TensorFlow's defaults, which differ for an `InteractiveSession`.
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
