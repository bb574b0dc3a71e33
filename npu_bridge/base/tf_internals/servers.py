"""Wraps private parts of the TensorFlow servers that collective operators use. Seen in TensorFlow 2.15.1."""

from __future__ import annotations

import ctypes
from typing import TYPE_CHECKING, Any, Callable

from npu_bridge.base.after_import import call_when_loaded, wrap_function
from npu_bridge.base.tf_internals.names import CONTEXT_MODULE

if TYPE_CHECKING:
    import tensorflow as tf


def serve_from_first_use(
    describe_cluster: Callable[[tf.compat.v1.ConfigProto], Any], when_started: Callable[[], None]
) -> None:
    """Makes the process a server of a cluster as soon as it executes eagerly or makes a session.

    Must be called before either. Values made before the process became a server cannot be used afterwards.
    Checked in TF 2.15: `Context.ensure_initialized`, `_collective_ops_server_def` and `enable_collective_ops`.

    Args:
      describe_cluster: returns the ServerDef for the settings of the process; called once, right before the start.
      when_started: called once, right after the server has started.
    """

    def ensure_initialized(stock_method, context):
        is_first = context._context_handle is None and context._collective_ops_server_def is None
        if is_first:
            context.enable_collective_ops(describe_cluster(context.config))
        stock_method(context)
        if is_first:
            # A server cannot be stopped, and TensorFlow prints a line if Python frees a server when it exits.
            ctypes.pythonapi.Py_IncRef(ctypes.py_object(context._context_handle))
            when_started()

    call_when_loaded(
        CONTEXT_MODULE, lambda module: wrap_function(module.Context, "ensure_initialized", ensure_initialized)
    )


def start_serving() -> None:
    """Starts the server of `serve_from_first_use` now, unless it runs (`context.ensure_initialized`, TF 2.15)."""
    from tensorflow.python.eager import context

    context.ensure_initialized()
