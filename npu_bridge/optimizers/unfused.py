"""Runs a rule on variables one by one."""

from __future__ import annotations

import logging
from typing import Any

import numpy as np

from npu_bridge.base.errors import say_once
from npu_bridge.base.own_tensorflow import tf
from npu_bridge.optimizers.groups import VariableTreatment
from npu_bridge.optimizers.rule import Rule

# A sparse gradient of more elements than this triggers a warning when it becomes dense: 64 MB in float32.
_LARGE_ELEMENTS = 2**24


def update_dtype(variable: Any) -> tf.DType:
    """Returns the dtype in which a variable's update is computed and its slots are kept: float32 at least."""
    dtype = tf.as_dtype(variable.dtype).base_dtype
    return tf.float32 if dtype.size < tf.float32.size else dtype


def as_dense(gradient: Any, variable: Any) -> tf.Tensor:
    """Returns a variable's gradient as a dense tensor; sums the rows of a sparse gradient that have the same index."""
    if not isinstance(gradient, tf.IndexedSlices):
        return gradient
    dense_shape = tf.shape(variable) if gradient.dense_shape is None else tf.convert_to_tensor(gradient.dense_shape)
    shape = tf.get_static_value(dense_shape)
    is_large = shape is not None and np.prod(shape, dtype=np.float64) > _LARGE_ELEMENTS
    say_once(
        logging.WARNING if is_large else logging.INFO,
        "Sparse gradients become dense: update rules such as LAMB need every row of a variable and of its slots."
        + (f" The dense gradient of shape {[*map(int, shape)]} takes memory in every step." if is_large else ""),
    )
    return tf.math.unsorted_segment_sum(gradient.values, gradient.indices, dense_shape[0])


def update_variable(variable: Any, gradient: Any, slots: dict, treatment: VariableTreatment, hypers: Any) -> Any:
    """Updates one variable and its slots (variables by slot name); makes a sparse gradient dense.

    Args:
      hypers: the hyper-parameters of this update in the working dtype, see `compute_hyper_values`.
    Returns:
      The op to wait for; None in eager execution.
    """
    dtype = update_dtype(variable)
    old_slots = {name: tf.convert_to_tensor(slot) for name, slot in slots.items()}
    parameter = tf.cast(tf.convert_to_tensor(variable), dtype)
    gradient = tf.cast(as_dense(gradient, variable), dtype)
    amount, new_slots = treatment.rule.amount_with_decay(parameter, gradient, old_slots, hypers)
    own_dtype = tf.as_dtype(variable.dtype).base_dtype
    # A TF 1 reference variable exposes its own buffer: all reads must precede the first write.
    with tf.control_dependencies([amount, *new_slots.values()]):
        written = [slots[name].assign(value, read_value=False) for name, value in new_slots.items()]
        if own_dtype == dtype:
            written.append(variable.assign_sub(amount, read_value=False))
        else:
            written.append(variable.assign(tf.cast(parameter - amount, own_dtype), read_value=False))
    return None if tf.executing_eagerly() else tf.group(*written)


def apply_norm_factor(rule: Rule, grads_and_vars: list) -> list:
    """Multiplies gradients by the factor of their global norm, for rules that use it; makes these gradients dense."""
    if not rule.uses_global_norm:
        return grads_and_vars
    dense = [(None if grad is None else as_dense(grad, variable), variable) for grad, variable in grads_and_vars]
    given = [grad for grad, _ in dense if grad is not None]
    norm = tf.linalg.global_norm([tf.cast(grad, tf.float32) for grad in given])

    def multiply_in_float64():
        # The squares of finite gradients overflow float32 from 1.8e19 on, and the factor would be 0.
        wide = [tf.cast(grad, tf.float64) for grad in given]
        factor = rule.gradient_factor(tf.linalg.global_norm(wide))
        return tuple(tf.cast(grad * factor, own.dtype) for grad, own in zip(wide, given))

    factor = rule.gradient_factor(norm)
    made = tf.cond(
        tf.math.is_finite(norm),
        lambda: tuple(grad * tf.cast(factor, grad.dtype) for grad in given),
        multiply_in_float64,
    )
    multiplied = iter(made if isinstance(made, (list, tuple)) else [made])  # the classic tf.cond unpacks a single one
    return [(None if grad is None else next(multiplied), variable) for grad, variable in dense]
