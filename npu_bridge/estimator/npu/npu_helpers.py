"""Provides short helpers for configurations, sessions and hooks in scripts."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import tensorflow as tf
from tensorflow.core.protobuf.rewriter_config_pb2 import RewriterConfig

from npu_bridge import collective
from npu_bridge import session as effects
from npu_bridge.base import environment
from npu_bridge.base.errors import refuse_unknown_keywords
from npu_bridge.base.terminal import logger
from npu_bridge.base.tf_internals.sessions import is_closed
from npu_bridge.base.tf_internals.training import session_config, set_session_config
from npu_bridge.collective.fragments import check_first_parameters
from npu_bridge.estimator.npu.npu_callbacks import NPUBroadcastGlobalVariablesCallback
from npu_bridge.estimator.npu.npu_hook import NPUBroadcastGlobalVariablesHook
from npu_bridge.estimator.npu.npu_loss_scale_manager import advice_for_scale
from npu_bridge.estimator.npu.npu_optimizer import (
    NPUDistributedOptimizer,
    check_combine_grad,
    check_optimizer_arguments,
)
from npu_bridge.gradients.keras.optimizer import wrap_keras_optimizer
from npu_bridge.gradients.keras.settings import KerasSettings
from npu_bridge.gradients.recipe import copy_stages
from npu_bridge.options import read_session_config
from npu_bridge.options.reading import ENTRY_NAME
from npu_bridge.reporting.straggler_callback import StragglerCallback
from npu_bridge.session.average_metrics import AverageMetricsCallback

__all__ = [
    "close_session",
    "experimental_options",
    "get_npu_local_rank_id",
    "get_npu_local_rank_size",
    "get_npu_rank_id",
    "get_npu_rank_size",
    "init_resource",
    "npu_callbacks_append",
    "npu_clear_session",
    "npu_config_proto",
    "npu_graph_options",
    "npu_hooks_append",
    "npu_keras_optimizer",
    "npu_optimizer_options",
    "npu_run_config_init",
    "npu_tf_optimizer",
    "set_keras_session_npu_config",
    "shutdown_resource",
]

_LOG = logger(__name__)
_JIT_OFF = tf.compat.v1.OptimizerOptions.OFF

# Kept for scripts that read it; unused here.
experimental_options = {
    "disable_model_pruning": False,
    "function_optimization": RewriterConfig.ON,
    "constant_folding": RewriterConfig.ON,
    "shape_optimization": RewriterConfig.ON,
    "arithmetic_optimization": RewriterConfig.ON,
    "loop_optimization": RewriterConfig.ON,
    "dependency_optimization": RewriterConfig.ON,
    "layout_optimizer": RewriterConfig.ON,
}


def npu_config_proto(config_proto: Any = None) -> tf.compat.v1.ConfigProto:
    """Prepares session settings for the NPU stack, with an `NpuOptimizer` entry.

    Changes and returns the object passed in. If the entry is missing, adds it and sets `memory_optimization` to
    `RewriterConfig.OFF`. Switches soft placement on; switches the placement log, remapping and XLA off.

    Args:
      config_proto: a ConfigProto; anything else is replaced by a new one.
    """
    config = config_proto if isinstance(config_proto, tf.compat.v1.ConfigProto) else tf.compat.v1.ConfigProto()
    rewrite = config.graph_options.rewrite_options
    if not effects.has_optimizer_entry(config):
        rewrite.custom_optimizers.add().name = ENTRY_NAME
        rewrite.memory_optimization = RewriterConfig.OFF  # the number that means MANUAL in this field
    if config.log_device_placement:
        _LOG.info("npu_config_proto: log_device_placement is switched off. To log placements, set it after this call.")
    config.allow_soft_placement = True
    config.log_device_placement = False
    rewrite.remapping = RewriterConfig.OFF
    npu_graph_options(config.graph_options)
    return config


def npu_graph_options(graph_options: Any = None) -> tf.compat.v1.GraphOptions:
    """Switches XLA off in graph options; returns the object passed in, or a new one for any other type."""
    if not isinstance(graph_options, tf.compat.v1.GraphOptions):
        graph_options = tf.compat.v1.GraphOptions()
    graph_options.optimizer_options.global_jit_level = _JIT_OFF
    return graph_options


def npu_optimizer_options(optimizer_options: Any = None) -> tf.compat.v1.OptimizerOptions:
    """Switches XLA off in optimizer options; returns the object passed in, or a new one for any other type."""
    if not isinstance(optimizer_options, tf.compat.v1.OptimizerOptions):
        optimizer_options = tf.compat.v1.OptimizerOptions()
    optimizer_options.global_jit_level = _JIT_OFF
    return optimizer_options


def npu_run_config_init(run_config: Any = None) -> tf.estimator.RunConfig:
    """Prepares the session settings of a RunConfig with `npu_config_proto`.

    Args:
      run_config: a RunConfig, changed and returned. Its session settings are replaced by a prepared copy. Anything
        else than a RunConfig is replaced by a new one.
    """
    config = run_config if isinstance(run_config, tf.estimator.RunConfig) else tf.estimator.RunConfig()
    set_session_config(config, _normalised_copy(session_config(config)))
    return config


def set_keras_session_npu_config(config: Any = None) -> tf.compat.v1.Session:
    """Opens a session with normalised settings and makes it the Keras session.

    Args:
      config: a ConfigProto, left unchanged, or None.
    Returns:
      The session; the caller closes it.
    """
    session = tf.compat.v1.Session(config=_normalised_copy(config))
    tf.compat.v1.keras.backend.set_session(session)
    return session


def npu_clear_session(config: Any = None) -> None:
    """Clears the Keras graph and session, then calls `set_keras_session_npu_config(config)`."""
    tf.compat.v1.keras.backend.clear_session()
    set_keras_session_npu_config(config)


def init_resource(config: Any = None) -> tuple[tf.compat.v1.Session, tf.Operation]:
    """Starts the communication between ranks, and opens a session that scripts keep until the end.

    The options in `config` are checked. This session is neither dumped nor profiled: training opens other sessions.

    Args:
      config: a ConfigProto, left unchanged, or None.
    Returns:
      The session, and the operator to pass to `shutdown_resource`.
    Raises:
      ValueError: an option in `config` is illegal.
    Graph: a no-op in the default graph.
    Ranks: with several ranks, Horovod starts here unless it already runs.
    """
    normalised = _normalised_copy(config)
    options = read_session_config(normalised)
    collective.current()
    graph = tf.compat.v1.get_default_graph()
    effects.prepare_graph(options, graph, belongs_to_this_run=False)
    with graph.as_default(), tf.control_dependencies(None):
        shutdown = tf.no_op(name="npu_shutdown")
    session = tf.compat.v1.Session(graph=graph, config=effects.prepare_session_config(options, normalised))
    effects.apply_determinism(session, options)
    return session, shutdown


def shutdown_resource(sess: tf.compat.v1.Session, npu_shutdown: tf.Operation) -> None:
    """Does nothing, because communication ends with the process; the counterpart of `init_resource`.

    Args:
      sess, npu_shutdown: the results of `init_resource`.
    """
    if not is_closed(sess):
        sess.run(npu_shutdown)


def close_session(sess: tf.compat.v1.Session) -> None:
    """Closes a session."""
    sess.close()


def get_npu_rank_id() -> int:
    """Returns the rank of this process, from 0; a process that trains alone has rank 0."""
    return collective.current().rank


def get_npu_local_rank_id() -> int:
    """Returns the local rank, from 0: the position of this process among the ranks of its machine."""
    return collective.current().local_rank


def get_npu_rank_size() -> int:
    """Returns the number of ranks; 1 for a process that trains alone."""
    return collective.current().size


def get_npu_local_rank_size() -> int:
    """Returns the number of ranks on this machine; 1 for a process that trains alone."""
    return collective.current().local_size


def npu_hooks_append(hooks_list: Any = ()) -> list:
    """Adds the hook that broadcasts the variables of rank 0 to all ranks.

    Args:
      hooks_list: a list, to which the hook is appended, or a tuple, which is copied to a list. Any other value is
        dropped, with a warning unless it is None.
    Returns:
      The list; its last element is an `NPUBroadcastGlobalVariablesHook`.
    Raises:
      ValueError: RANK_ID is set to a value that is not a rank.
    """
    hook = NPUBroadcastGlobalVariablesHook(0, environment.declared_rank() or 0)
    return _append_to_list(hooks_list, hook, "npu_hooks_append", "hooks_list")


def npu_callbacks_append(callbacks_list: Any = ()) -> list:
    """Adds Keras callbacks that broadcast the variables of rank 0, average metrics over ranks, and report stragglers.

    Args:
      callbacks_list: as `hooks_list` of `npu_hooks_append`.
    Returns:
      The list; its last element is an `NPUBroadcastGlobalVariablesCallback`. With several ranks the first element is
      an `AverageMetricsCallback` of `npu_bridge.session`, so that later callbacks see the metrics of all ranks. The
      second element is a `StragglerCallback` of `npu_bridge.reporting`.
    """
    callback = NPUBroadcastGlobalVariablesCallback(0)
    callbacks = _append_to_list(callbacks_list, callback, "npu_callbacks_append", "callbacks_list")
    for kind in (StragglerCallback, AverageMetricsCallback) if collective.current().size > 1 else ():
        if not any(isinstance(each, kind) for each in callbacks):
            callbacks.insert(0, kind())
    return callbacks


def npu_tf_optimizer(opt: Any) -> NPUDistributedOptimizer:
    """Returns `NPUDistributedOptimizer(opt)`."""
    return NPUDistributedOptimizer(opt)


@refuse_unknown_keywords({"loss_scale": advice_for_scale})
def npu_keras_optimizer(
    opt: Any,
    loss_scale_manager: Any = None,
    is_distributed: bool = True,
    is_loss_scale: bool | None = None,
    is_tailing_optimization: bool = False,
    *,
    wire: str = "none",
    stages: Sequence[Any] = (),
    gradient_split_groups: Sequence[int] | None = None,
    combine_grad: bool = False,
    check_combined_tensors: bool = False,
) -> Any:
    """Adds distribution, loss scaling and tail optimisation to a Keras optimizer of any generation.

    With `opt` alone the result is `KerasDistributeOptimizer(opt)`. With a manager the result trains like
    `NPUOptimizer`: a gradient that overflows on some rank skips the step on every rank, and a skipped step changes
    only the loss scale, not even `iterations`. This works in `fit`, and around a custom `tf.GradientTape` with
    `get_scaled_loss` and `get_unscaled_gradients`; in Keras 3 also with `scale_loss` and `apply`. Keras shows the
    unscaled loss, and adds no second loss scaling to a mixed_float16 model.
    The attributes `loss_scale`, `skipped_steps` and `last_step_skipped` are saved with the model.

    Args:
      opt: a `tf.keras.optimizers.Optimizer`, a `tf.keras.optimizers.legacy.Optimizer`, or a
        `keras.optimizers.Optimizer` of Keras 3 on TensorFlow.
      loss_scale_manager, is_distributed: as in `NPUOptimizer`.
      is_loss_scale: as in `NPUOptimizer`; None means True if a manager is given, else False.
      is_tailing_optimization, wire, stages, gradient_split_groups: as in `NPUOptimizer`.
      combine_grad, check_combined_tensors: as in `NPUOptimizer`.
    Returns:
      A Keras optimizer of the generation of `opt`.
    Raises:
      TypeError: `opt` is not a Keras optimizer, the manager is not a manager, or a switch is not True or False.
      ValueError: `opt` averages gradients or scales the loss itself, `is_loss_scale` is True without a manager, `wire`
        is not a wire format, or Keras 3 computes with another library.
    """
    owner = "npu_keras_optimizer"
    is_loss_scale = loss_scale_manager is not None if is_loss_scale is None else is_loss_scale
    manager = check_optimizer_arguments(
        owner, loss_scale_manager, is_distributed, is_loss_scale, is_tailing_optimization, wire
    )
    settings = KerasSettings(
        name="NpuKerasOptimizer",
        manager=manager,
        is_distributed=bool(is_distributed),
        is_tailing_optimization=bool(is_tailing_optimization),
        stages=tuple(copy_stages(stages, owner)),
        wire=wire,
        first_parameters=check_first_parameters(owner, gradient_split_groups),
        combines=check_combine_grad(owner, manager, combine_grad, check_combined_tensors),
        checks_combined=check_combined_tensors,
    )
    return wrap_keras_optimizer(opt, settings, owner)


def _append_to_list(existing: Any, addition: Any, owner: str, argument: str) -> list:
    if isinstance(existing, tuple):
        existing = list(existing)
    if not isinstance(existing, list):
        if existing is not None:
            _LOG.warning(
                "%s: %s is not a list. Expected a list; got %s, which is dropped. Pass a list.",
                owner,
                argument,
                type(existing).__name__,
            )
        existing = []
    existing.append(addition)
    return existing


def _normalised_copy(config: Any) -> tf.compat.v1.ConfigProto:
    copied = tf.compat.v1.ConfigProto()
    if isinstance(config, tf.compat.v1.ConfigProto):
        copied.CopyFrom(config)
    return npu_config_proto(copied)
