"""Sessions that read the options in their settings.

Once `decorate_sessions` has run (importing `npu_bridge.npu_init` does it, or anything below `npu_bridge.estimator` or
`npu_bridge.hccl`; and `npu_bridge` itself, where TensorFlow is there already), the constructors of
`tf.compat.v1.Session` and `InteractiveSession` look at the ConfigProto they are given. One without an
`NpuOptimizer` entry, or none at all, goes to TensorFlow exactly as it is. With an entry, its options are checked
and have their effect; the caller's ConfigProto is never changed.

On the NPU stack every session of the process is changed: soft placement on, placement log, remapping and XLA off.
Here only sessions with an entry are touched, and of these settings only soft placement is made.
"""

from __future__ import annotations

import functools
import inspect
from typing import Any, Callable

import tensorflow as tf

from npu_bridge import session as effects
from npu_bridge.options import of_graph, read_session_config
from npu_bridge.precision import Precision, attach
from npu_bridge.session.graph_rewrites import check_placement

__all__ = ["decorate_sessions", "decorator_tf_session"]

_MARK = "_reads_npu_options"


def decorator_tf_session(func: Callable) -> Callable:
    """A session constructor that reads the options in its `config`.

    Args:
      func: `Session.__init__` or one with the same parameters; one that was decorated is returned as it is.
    Returns:
      A constructor with the same parameters. It raises ValueError when an option is illegal, or when the graph
      was built against the options.
    """
    if getattr(func, _MARK, False):
        return func
    signature = inspect.signature(func)

    @functools.wraps(func)
    def __init__(self, *args: Any, **kwargs: Any) -> None:
        try:
            bound = signature.bind(self, *args, **kwargs)
        except TypeError:
            return func(self, *args, **kwargs)  # which says what is wrong with the call
        config = bound.arguments.get("config")
        if not effects.has_entry(config):
            return func(self, *args, **kwargs)
        self._session = None  # what a session's finalizer looks at when the constructor fails
        options = read_session_config(config)
        precision = Precision(options)
        graph = bound.arguments.get("graph")
        graph = tf.compat.v1.get_default_graph() if graph is None else graph
        bound.arguments["config"] = effects.prepare_session_config(options, config)
        precision.prepare(bound.arguments["config"])
        if options.use_off_line and isinstance(graph, tf.Graph):
            of_graph.publish(options, graph)
            effects.apply_process_settings(options, graph)
            check_placement(options, graph)
        func(*bound.args, **bound.kwargs)
        attach(self, precision)
        effects.run_with_hooks(self, effects.hooks_for(options))

    setattr(__init__, _MARK, True)
    return __init__


def decorate_sessions() -> None:
    """Decorates the constructors of `Session` and `InteractiveSession`; again is as good as once."""
    for session_class in (tf.compat.v1.Session, tf.compat.v1.InteractiveSession):
        constructor = session_class.__init__
        decorated = decorator_tf_session(constructor)
        if decorated is not constructor:
            session_class.__init__ = decorated
