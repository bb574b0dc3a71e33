"""Wraps private parts of eagerly called functions, and of TensorFlow's graph rewriter. Seen in TensorFlow 2.15.1."""

from __future__ import annotations

import contextlib
import functools
import threading
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any, Callable

from npu_bridge.base.after_import import wrap_function

if TYPE_CHECKING:
    import tensorflow as tf

_RENAMING = threading.local()


def keep_from_autograph(packages: Sequence[str]) -> None:
    """Keeps AutoGraph from converting the functions of packages (`autograph.core.config.CONVERSION_RULES`, TF 2.15).

    A function that a user's `tf.function` calls would be converted with all functions that it calls: half a minute
    without a benefit.
    """
    from tensorflow.python.autograph.core import config

    config.CONVERSION_RULES = (*map(config.DoNotConvert, packages), *config.CONVERSION_RULES)


def eager_function_definition(name: str) -> Any:
    """Returns the FunctionDef of a function that eager code can call, or None (`Context.get_function_def`, TF 2.15)."""
    from tensorflow.python.eager import context

    current = context.context()
    return current.get_function_def(name) if current.has_function(name) else None


def add_function(definition: Any) -> None:
    """Adds a FunctionDef for eager calls (`Context.add_function_def`, TF 2.15)."""
    from tensorflow.python.eager import context

    context.context().add_function_def(definition)


@contextlib.contextmanager
def redirect_calls_in_block(replacement_name: Callable[[str], str] | None) -> Iterator[None]:
    """Redirects this thread's eager calls inside the block to the functions that `replacement_name` returns.

    Only the innermost block counts. None redirects nothing. Checked in TF 2.15: `Context.call_function`.
    """
    before = getattr(_RENAMING, "rename", None)
    redirect_calls(replacement_name)
    try:
        yield
    finally:
        _RENAMING.rename = before


def redirect_calls(replacement_name: Callable[[str], str] | None) -> None:
    """Redirects this thread's eager calls to the functions that `replacement_name` returns, from now on."""
    _wrap_call_function()
    _RENAMING.rename = replacement_name


@functools.cache
def _wrap_call_function() -> None:
    from tensorflow.python.eager.context import Context

    def call_function(call, context, name, *arguments, **keywords):
        rename = getattr(_RENAMING, "rename", None)
        if rename is not None:
            name = rename(name.decode() if isinstance(name, bytes) else name).encode()
        return call(context, name, *arguments, **keywords)

    wrap_function(Context, "call_function", call_function)


def rewritten_graph(graph: tf.Graph, fetches: Sequence[str], session_config: tf.compat.v1.ConfigProto) -> Any:
    """Returns the GraphDef that TensorFlow's graph rewriter makes for one CPU; starts no session.

    Checked in TF 2.15: `grappler.tf_optimizer.OptimizeGraph` and `grappler.cluster.Cluster`.

    Args:
      graph: a TF 1 graph.
      fetches: names of operators that the rewriter keeps, with all their inputs.
      session_config: selects the rewriter's passes.
    """
    import tensorflow as tf
    from tensorflow.core.protobuf.device_properties_pb2 import NamedDevice
    from tensorflow.python.grappler import cluster, tf_optimizer

    exported = tf.compat.v1.MetaGraphDef(graph_def=graph.as_graph_def(add_shapes=True))
    exported.collection_def["train_op"].node_list.value[:] = fetches
    device = NamedDevice(name="/job:localhost/replica:0/task:0/device:CPU:0")
    device.properties.type = "CPU"
    return tf_optimizer.OptimizeGraph(session_config, exported, cluster=cluster.Cluster(devices=[device]))
