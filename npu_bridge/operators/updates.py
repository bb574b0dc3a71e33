"""Computes the documented operators of optimizer updates; the optimizers themselves are in `optimizers/rules`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from npu_bridge.base.arguments import check_instance
from npu_bridge.base.own_tensorflow import tf


class Moments(NamedTuple):
    """The factors by which the two moments of a gradient g are updated.

    Attributes:
      keep_first, add_first: m ← keep_first·m + add_first·g, usually β1 and 1 - β1.
      keep_second, add_second: v ← keep_second·v + add_second·g², usually β2 and 1 - β2.
    """

    keep_first: Any
    add_first: Any
    keep_second: Any
    add_second: Any


def lars_gradient(
    weight: Any, gradient: Any, weight_decay: Any, trust: float, epsilon: float, largest_rate: Any = None
) -> tf.Tensor:
    """Returns c·(g + weight_decay·w) with c = trust·‖w‖ / (‖g‖ + weight_decay·‖w‖ + epsilon).

    With a `largest_rate`, c is first divided by `largest_rate` and clipped to [0, 1].
    """
    weight, gradient = tf.convert_to_tensor(weight), tf.convert_to_tensor(gradient)
    weight_decay = tf.cast(weight_decay, weight.dtype)
    weight_norm, gradient_norm = tf.norm(weight), tf.norm(gradient)
    # Three numbers added with + become one add_n, which adds them in any order: ranks could differ in a bit.
    terms = [gradient_norm, weight_decay * weight_norm, tf.cast(epsilon, weight.dtype)]
    scale = trust * weight_norm / tf.reduce_sum(terms)
    if largest_rate is not None:
        scale = tf.clip_by_value(scale / tf.cast(largest_rate, scale.dtype), 0.0, 1.0)
    return scale * (gradient + weight_decay * weight)


def adam_step(
    variables: Sequence[tf.Variable],
    gradient: Any,
    learning_rate: Any,
    moments: Moments,
    epsilon: Any,
    weight_decay: Any,
    where: str,
) -> tf.Operation | None:
    """Updates v, m and a variable in place, without bias correction; returns the op to run, or None in eager execution.

    var ← var - lr·(m / (√v + ε) + weight_decay·var), with the new m and v. `variables` are v, m and var, in this order.
    """
    second, first, variable = _check_variables(variables, where)
    new_first, new_second = _next_moments(first, second, gradient, moments)
    update = new_first / (tf.sqrt(new_second) + tf.cast(epsilon, new_second.dtype))
    if weight_decay is not None:
        update += tf.cast(weight_decay, update.dtype) * variable
    new_value = variable - tf.cast(learning_rate, update.dtype) * update
    written = [second.assign(new_second), first.assign(new_first), variable.assign(new_value)]
    return None if tf.executing_eagerly() else tf.group(*written)


def lamb_direction(
    slots: Sequence[tf.Variable],
    gradient: Any,
    weight: Any,
    moments: Moments,
    epsilon: Any,
    steps: Any,
    weight_decay: Any,
    where: str,
) -> tuple[tf.Tensor, tf.Tensor, tf.Tensor]:
    """Updates the slots v and m in place; returns the direction of a LAMB step, the new v and the new m.

    The direction is m̂ / (√v̂ + ε) + weight_decay·weight, with m̂ = m / (1 - β1^steps) and v̂ = v / (1 - β2^steps).
    """
    second, first = _check_variables(slots, where)
    new_first, new_second = _next_moments(first, second, gradient, moments)
    dtype = new_first.dtype
    steps = tf.cast(steps, dtype)
    corrected_first = new_first / (1 - tf.cast(moments.keep_first, dtype) ** steps)
    corrected_second = new_second / (1 - tf.cast(moments.keep_second, dtype) ** steps)
    direction = corrected_first / (tf.sqrt(corrected_second) + tf.cast(epsilon, dtype))
    direction += tf.cast(weight_decay, dtype) * tf.cast(weight, dtype)
    written = [second.assign(new_second), first.assign(new_first)]
    with tf.control_dependencies([] if tf.executing_eagerly() else written):
        return tf.identity(direction), tf.identity(new_second), tf.identity(new_first)


def lamb_step(
    weight_norm: Any, direction_norm: Any, learning_rate: Any, direction: Any, variable: tf.Variable, where: str
) -> Any:
    """Assigns var ← var - ratio·lr·direction, where ratio = ‖w‖ / ‖direction‖ if both norms are above 0, else 1."""
    (variable,) = _check_variables([variable], where)
    dtype = variable.dtype.base_dtype
    weight_norm, direction_norm = (tf.cast(norm, dtype) for norm in (weight_norm, direction_norm))
    ratio = tf.where(
        (weight_norm > 0) & (direction_norm > 0), tf.math.divide_no_nan(weight_norm, direction_norm), tf.ones([], dtype)
    )
    return variable.assign_sub(ratio * tf.cast(learning_rate, dtype) * tf.cast(direction, dtype))


def _next_moments(first, second, gradient, moments):
    dtype = first.dtype.base_dtype
    gradient = tf.cast(gradient, dtype)
    new_first = tf.cast(moments.keep_first, dtype) * first + tf.cast(moments.add_first, dtype) * gradient
    new_second = tf.cast(moments.keep_second, dtype) * second + tf.cast(moments.add_second, dtype) * gradient**2
    return new_first, new_second


def _check_variables(variables, where):
    for variable in variables:
        check_instance(where, "an input that is updated", variable, tf.Variable, "a tf.Variable", "Pass variables.")
    return variables
