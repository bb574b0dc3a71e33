"""Makes plain sessions read the options in their settings, and run with the hooks of these options.

`decorate_sessions` changes the constructors of `tf.compat.v1.Session` and `InteractiveSession`. It runs at the import
of `npu_bridge.npu_init`, of a name from a package of `npu_bridge` that needs TensorFlow, and of `npu_bridge` itself if
TensorFlow was imported before. The constructors then check and apply the options in a ConfigProto with an
`NpuOptimizer` entry. A ConfigProto without an entry, or None, is passed on unchanged, except after the import of
`npu_bridge.npu_init`: then it gets soft placement, since scripts expect `tf.device("/gpu:0")` to run everywhere, and
environment variables choose its GPU and switch profiling on. The caller's ConfigProto is never changed.

The NPU stack changes every session of the process: it switches soft placement on, and the placement log, remapping and
XLA off. This library sets only soft placement.
"""

from __future__ import annotations

import functools
import inspect
from typing import Any, Callable

import tensorflow as tf

from npu_bridge import session as effects
from npu_bridge.base.environment import options_set_by_launcher
from npu_bridge.base.session_wrapper import wrap_session_constructors
from npu_bridge.base.tf_internals.sessions import set_finalizer_attribute
from npu_bridge.estimator.npu.checks import check_steps_are_counted
from npu_bridge.gradients.collections import STEP_SKIPPED
from npu_bridge.gradients.first_step.training_apart import check_training_of_sessions
from npu_bridge.options import announce_ineffective_options, of_graph, read_session_config
from npu_bridge.session.devices import check_placement, choose_devices
from npu_bridge.session.precision import Precision, attach_precision
from npu_bridge.session.skips_hook import SkippedStepsHook

__all__ = ["decorate_sessions", "decorator_tf_session"]

_MARK = "_reads_npu_options"
_SWITCHED: dict = {}  # of this process, as Estimators and recovery make a training's sessions one after the other


def decorator_tf_session(func: Callable) -> Callable:
    """Returns a session constructor that reads the options in its `config`.

    Args:
      func: `Session.__init__`, or a constructor with the same parameters. A constructor that is already decorated is
        returned unchanged.
    Returns:
      A constructor with the parameters of `func`, which raises ValueError if an option is illegal.
    """
    if getattr(func, _MARK, False):
        return func
    signature = inspect.signature(func)

    @functools.wraps(func)
    def __init__(self, *args: Any, **kwargs: Any) -> None:
        try:
            bound = signature.bind(self, *args, **kwargs)
        except TypeError:
            return func(self, *args, **kwargs)  # raises the error of the wrong call
        config = bound.arguments.get("config")
        graph = bound.arguments.get("graph")
        graph = tf.compat.v1.get_default_graph() if graph is None else graph
        has_optimizer_entry = effects.has_optimizer_entry(config)
        options = None
        # An Estimator that has read the imposed options for its graph applies them to its sessions itself.
        is_imposed = (
            bool(options_set_by_launcher()) and isinstance(graph, tf.Graph) and of_graph.options_of(graph) is None
        )
        if has_optimizer_entry or is_imposed:
            set_finalizer_attribute(self)  # in case the constructor fails
            options = read_session_config(config)
            precision = Precision(options)
            if precision.switch is not None:
                precision.switch.continue_trainings(_SWITCHED)
            config = effects.prepare_session_config(options, config)
            precision.prepare(config)
            if has_optimizer_entry and options.use_off_line and isinstance(graph, tf.Graph):
                of_graph.record_options(options, graph)
                effects.prepare_graph(options, graph, belongs_to_this_run=False)
                check_placement(options, graph)
        if __init__.places_softly and isinstance(  # type: ignore[attr-defined]
            config, (tf.compat.v1.ConfigProto, type(None))
        ):
            config = effects.placed_softly(config, isinstance(self, tf.compat.v1.InteractiveSession))
            if options is None:
                options = read_session_config(None)  # the values of environment variables
                choose_devices(options, config)
        if config is not bound.arguments.get("config"):
            bound.arguments["config"] = config
        func(*bound.args, **bound.kwargs)
        check_training_of_sessions()
        if isinstance(graph, tf.Graph):
            check_steps_are_counted(graph)
        if has_optimizer_entry:
            announce_ineffective_options(options)
        if has_optimizer_entry or is_imposed:
            effects.apply_determinism(self, options)
            attach_precision(self, precision)
            is_training = isinstance(graph, tf.Graph) and graph.get_collection_ref(STEP_SKIPPED)
            effects.run_with_hooks(self, [*effects.hooks_for(options), *([SkippedStepsHook()] if is_training else [])])
        else:
            effects.apply_determinism(self)
            effects.run_with_hooks(self, [] if options is None else effects.hooks_for(options))

    setattr(__init__, _MARK, True)
    __init__.places_softly = False  # type: ignore[attr-defined]
    return __init__


def decorate_sessions(places_softly: bool = False) -> None:
    """Decorates the constructors of `Session` and `InteractiveSession`; calling it again has no effect.

    Args:
      places_softly: whether all future sessions use soft placement, even sessions without an `NpuOptimizer` entry.
    """
    for decorated in wrap_session_constructors(decorator_tf_session):
        decorated.places_softly = decorated.places_softly or places_softly
