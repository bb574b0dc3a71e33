"""Builds the `host_call` of an `NPUEstimatorSpec`: a function whose operators, such as summaries, run in each step."""

from __future__ import annotations

import inspect
from typing import Any, Callable

import tensorflow as tf

from npu_bridge.base.tf_internals.sessions import summary_operators, summary_writer_initializers


def call_on_host(function: Callable, tensors: Any, control_input: Any) -> tf.Operation:
    """Builds the operators of a host call, and returns the operator that runs them all.

    Args:
      function: called once, immediately; returns an operator, a tensor, or a structure of them. The `tf.summary`
        operators it makes need not be returned.
      tensors: list or tuple of the function's arguments, or a dict of keyword arguments.
      control_input: operator or tensor that is computed before the arguments, including variables, are read.
    Graph: an identity of each argument, the operators of `function`, and a group.
    """
    known = len(summary_operators())
    # Only the arguments wait, not all operators of the function: a summary writer exists before the first step.
    with tf.control_dependencies([control_input]):
        captured = tf.nest.map_structure(tf.identity, tensors)
    returned = function(**captured) if isinstance(captured, dict) else function(*captured)
    wanted = [part for part in tf.nest.flatten(returned) if part is not None]
    return tf.group(*wanted, *summary_operators()[known:], name="host_call")


def check_host_call(host_call: Any) -> None:
    """Checks the `host_call` of an `NPUEstimatorSpec`.

    Raises:
      ValueError: `host_call` is not a pair of a function and its arguments.
      TypeError: the first element cannot be called.
      RuntimeError: the function takes another number of arguments.
    """
    if not isinstance(host_call, (tuple, list)) or len(host_call) != 2:
        raise ValueError(
            f"NPUEstimatorSpec: host_call is not a pair. Expected (function, tensors); got {host_call!r}. Pass a tuple "
            f"of two."
        )
    function, tensors = host_call
    if not callable(function):
        raise TypeError(
            f"NPUEstimatorSpec: the first element of host_call cannot be called. Expected a function; got "
            f"{function!r}. Pass (function, tensors)."
        )
    if not isinstance(tensors, (tuple, list, dict)):
        raise ValueError(
            f"NPUEstimatorSpec: the second element of host_call holds no arguments. Expected a list, tuple or dict of "
            f"tensors; got {tensors!r}. Pass [tensor] for a single tensor."
        )
    positional, named = ((), tensors) if isinstance(tensors, dict) else (tensors, {})
    try:
        inspect.signature(function).bind(*positional, **named)
    except TypeError as error:
        raise RuntimeError(
            f"NPUEstimatorSpec: host_call does not fit its function. Expected tensors for its arguments "
            f"{inspect.signature(function)}; got {len(tensors)} ({error}). Pass as many tensors as the function takes."
        ) from None


class HostCallHook(tf.estimator.SessionRunHook):
    """A hook that opens the graph's summary writers in a new session, and flushes the writers when the session ends.

    Ranks: local.
    """

    def __init__(self):
        self._open = []
        self._flush = []

    def begin(self):
        """Finds the writers of the graph that is about to run."""
        self._open = summary_writer_initializers()
        self._flush = [tf.raw_ops.FlushSummaryWriter(writer=op.inputs[0]) for op in self._open]

    def after_create_session(self, session, coord):
        """Opens the writers; also called after a lost session was recreated."""
        del coord
        session.run(self._open)

    def end(self, session):
        """Flushes the writers."""
        session.run(self._flush)
