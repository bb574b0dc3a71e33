"""Conditions that work alike in TF 1 graphs, in functions and in eager execution."""

from __future__ import annotations

import contextlib
from typing import Any, Callable

import tensorflow as tf

from npu_bridge.gradients.graph_mode import building_graph, classic_control_flow


def run_if(condition: tf.Tensor, run: Callable[[], Any]) -> Any:
    """Runs `run` when the condition is True, else nothing.

    Returns:
      The op that does so; what `run` returned, or None, when executed eagerly.
    """
    if tf.executing_eagerly():
        return run() if bool(condition) else None
    if building_graph():
        # Slots made inside the branch keep the names they have without a gate, and so in checkpoints.
        name_scope = tf.compat.v1.get_default_graph().get_name_scope()

        def applied():
            with tf.name_scope(name_scope + "/" if name_scope else ""):
                return tf.group(run())

        with classic_control_flow():
            return tf.cond(condition, applied, tf.no_op)

    def applied_in_function():
        run()
        return True

    return tf.cond(condition, applied_in_function, lambda: False)


def tensors_if(condition: tf.Tensor, make: Callable[[], list], otherwise: Callable[[], list]) -> list:
    """The tensors that `make` gives when the condition is True, else those of `otherwise`.

    In a TF 1 graph each of them is there as soon as it is made, whatever else the branch still has to do.

    Args:
      condition: boolean scalar.
      make: gives tensors; called first.
      otherwise: gives as many, of the same dtypes.
    """
    if tf.executing_eagerly():
        return make() if bool(condition) else otherwise()
    with classic_control_flow() if building_graph() else contextlib.nullcontext():
        tensors = tf.cond(condition, lambda: tuple(make()), lambda: tuple(otherwise()))
    return list(tensors) if isinstance(tensors, (list, tuple)) else [tensors]  # the classic one unpacks a single one
