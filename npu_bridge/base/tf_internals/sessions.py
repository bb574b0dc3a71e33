"""Wraps private parts of sessions, of their runs and of the process's settings. Seen in TensorFlow 2.15.1."""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any, Callable

if TYPE_CHECKING:
    import tensorflow as tf


def run_without_engines(
    session: Any, fetches: Sequence = (), targets: Sequence = (), feeds: dict | None = None
) -> list:
    """Runs a session without its hooks and engines, except those that call kernels (`BaseSession._do_run`, TF 2.15).

    `feeds` maps tensors to values. Returns the values of `fetches`.
    """
    from tensorflow.python.client.session import BaseSession

    elements = [session.graph.as_graph_element(element) for element in fetches]
    by_reference = {tensor.ref(): value for tensor, value in (feeds or {}).items()}
    return inspect.unwrap(BaseSession._do_run)(session, None, list(targets), elements, by_reference, None, None)


def session_interface() -> type:
    """Returns the class that savers accept as a session (`client.session.SessionInterface`, TF 2.15)."""
    from tensorflow.python.client.session import SessionInterface

    return SessionInterface


def is_remote(session: tf.compat.v1.Session) -> bool:
    """Returns whether a session runs on a TensorFlow server of another process (`BaseSession._target`, TF 2.15)."""
    return bool(session._target) and not getattr(session, "_npu_bridge_is_served_here", False)


def can_build_without_running(session: tf.compat.v1.Session) -> bool:
    """Returns whether a session can build an executor without running it.

    If the run names a missing thread pool, a session without a server builds the executor and then refuses the run. A
    server would run the executor (`BaseSession._target`, TF 2.15).
    """
    return not session._target


def is_closed(session: Any) -> bool:
    """Returns whether a session was closed; False for other objects (`BaseSession._closed`, TF 2.15)."""
    return getattr(session, "_closed", False)


def plain_session(session: Any) -> Any:
    """Returns the session inside a MonitoredSession (`_tf_sess`, TF 2.15); any other session unchanged."""
    return session._tf_sess() if hasattr(session, "_tf_sess") else session


def set_finalizer_attribute(session: tf.compat.v1.Session) -> None:
    """Sets the attribute that a session's finalizer reads (`BaseSession._session`, TF 2.15)."""
    session._session = None


@contextlib.contextmanager
def run_options_buffer(options: tf.compat.v1.RunOptions) -> Iterator[Any]:
    """Yields a buffer with RunOptions for `_do_run` (`pywrap_tf_session.TF_NewBufferFromString`, TF 2.15)."""
    from tensorflow.python.client import pywrap_tf_session

    buffer = pywrap_tf_session.TF_NewBufferFromString(options.SerializeToString())
    try:
        yield buffer
    finally:
        pywrap_tf_session.TF_DeleteBuffer(buffer)


@contextlib.contextmanager
def empty_buffer() -> Iterator[Any]:
    """Yields a buffer that a run can write its RunMetadata into (`pywrap_tf_session.TF_NewBuffer`, TF 2.15)."""
    from tensorflow.python.client import pywrap_tf_session

    buffer = pywrap_tf_session.TF_NewBuffer()
    try:
        yield buffer
    finally:
        pywrap_tf_session.TF_DeleteBuffer(buffer)


@contextlib.contextmanager
def collected_function_graphs() -> Iterator[tf.compat.v1.RunMetadata]:
    """Yields a RunMetadata; after the block it holds the graphs of functions that were first called inside.

    Blocks cannot be nested. Checked in TF 2.15: `context.enable_graph_collection`, `export_run_metadata` and
    `disable_graph_collection`.
    """
    import tensorflow as tf
    from tensorflow.python.eager import context

    context.enable_graph_collection()
    context.export_run_metadata()  # discards graphs of earlier calls
    metadata = tf.compat.v1.RunMetadata()
    try:
        yield metadata
        metadata.MergeFrom(context.export_run_metadata() or tf.compat.v1.RunMetadata())
    finally:
        context.disable_graph_collection()


def read_content(buffer: Any) -> bytes:
    """Returns the serialized message in a buffer (`pywrap_tf_session.TF_GetBuffer`, TF 2.15)."""
    from tensorflow.python.client import pywrap_tf_session

    return pywrap_tf_session.TF_GetBuffer(buffer)


def default_session_config() -> tf.compat.v1.ConfigProto:
    """Returns the default settings of sessions, which `tf.config` changes (`context().config`, TF 2.15)."""
    from tensorflow.python.eager import context

    return context.context().config


def has_eager_context() -> bool:
    """Returns whether this process has begun to execute eagerly (`context._context_handle`, TF 2.15)."""
    from tensorflow.python.eager import context

    return context.context_safe() is not None and context.context()._context_handle is not None


def function_call_settings() -> Any:
    """Returns the settings with which this thread calls functions (`context().function_call_options`, TF 2.15)."""
    from tensorflow.python.eager import context

    current = context.context()
    current.ensure_initialized()
    return current.function_call_options


def set_function_call_settings(settings: Any) -> None:
    """Changes the settings with which this thread calls functions (`context().function_call_options`, TF 2.15)."""
    from tensorflow.python.eager import context

    context.context().function_call_options = settings


def copy_with_changed_config(settings: Any, change: Callable[[tf.compat.v1.ConfigProto], Any]) -> Any:
    """Returns a copy of function settings with a ConfigProto changed by `change` (`FunctionCallOptions`, TF 2.15)."""
    import tensorflow as tf

    config = tf.compat.v1.ConfigProto.FromString(settings.config_proto_serialized)
    change(config)
    return type(settings)(settings.executor_type, config)


def is_deterministic() -> bool:
    """Returns whether the process uses deterministic kernels (`config.is_op_determinism_enabled`, TF 2.15)."""
    from tensorflow.python.framework import config

    return config.is_op_determinism_enabled()


def set_deterministic(is_on: bool) -> None:
    """Switches deterministic kernels on or off, which the public interface cannot (`framework.config`, TF 2.15)."""
    from tensorflow.python.framework import config

    (config.enable_op_determinism if is_on else config.disable_op_determinism)()


def chrome_trace(step_stats: Any) -> str:
    """Returns the StepStats of a run as JSON for chrome://tracing (`client.timeline.Timeline`, TF 2.15)."""
    from tensorflow.python.client.timeline import Timeline

    return Timeline(step_stats).generate_chrome_trace_format(show_dataflow=False)


def summary_operators() -> list:
    """Returns the operators of `tf.summary` in the default graph (`summary_ops_v2.all_v2_summary_ops`, TF 2.15)."""
    from tensorflow.python.ops import summary_ops_v2

    return list(summary_ops_v2.all_v2_summary_ops() or ())


def summary_writer_initializers() -> list:
    """Returns the operators that open the default graph's summary writers (`summary_ops_v2`, TF 2.15)."""
    from tensorflow.python.ops import summary_ops_v2

    return list(summary_ops_v2.summary_writer_initializer_op())


def find_devices() -> list[str]:
    """Finds the devices of this machine, without a context of eager execution (`TF_ListPhysicalDevices`, TF 2.15)."""
    from tensorflow.python import pywrap_tfe

    return [name.decode() for name in pywrap_tfe.TF_ListPhysicalDevices()]
