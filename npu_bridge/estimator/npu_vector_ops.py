"""Provides the two parts of a LAMB step, and PReLU."""

from __future__ import annotations

from typing import Any

from npu_bridge.base.own_tensorflow import tf
from npu_bridge.operators import updates
from npu_bridge.operators.updates import Moments

__all__ = ["PReLU", "lamb_apply_optimizer_assign", "lamb_apply_weight_assign"]

PReLU = tf.keras.layers.PReLU


def lamb_apply_optimizer_assign(
    input0: Any,
    input1: tf.Variable,
    input2: tf.Variable,
    input3: Any,
    mul0_x: Any,
    mul1_x: Any,
    mul2_x: Any,
    mul3_x: Any,
    add2_y: Any,
    steps: Any,
    do_use_weight: Any,
    weight_decay_rate: Any,
    name: str | None = None,
) -> tuple[tf.Tensor, tf.Tensor, tf.Tensor]:
    """Returns the direction of a LAMB step, m̂/(√v̂ + ε) + do_use_weight·weight_decay_rate·var; updates m and v.

    Updates in place: m ← β1·m + (1-β1)·g, v ← β2·v + (1-β2)·g². m̂ = m/(1 - β1^steps), v̂ = v/(1 - β2^steps).

    Args:
      input0: gradient g.
      input1, input2: variables v and m.
      input3: var, in float32.
      mul0_x, mul1_x, mul2_x, mul3_x: β1, 1-β1, β2, 1-β2.
      add2_y: ε.
      steps: number of this step, from 1.
      do_use_weight: 1 for weight decay, 0 for none.
      weight_decay_rate: factor of the weight decay.
      name: scope of the ops.
    Returns:
      The direction, the new v and the new m.
    Raises:
      TypeError: v or m is not a variable.
    """
    with tf.name_scope(name or "lamb_apply_optimizer_assign"):
        weight_decay = tf.cast(do_use_weight, tf.float32) * tf.cast(weight_decay_rate, tf.float32)
        moments = Moments(mul0_x, mul1_x, mul2_x, mul3_x)
        where = "npu_vector_ops.lamb_apply_optimizer_assign"
        return updates.lamb_direction((input1, input2), input0, input3, moments, add2_y, steps, weight_decay, where)


def lamb_apply_weight_assign(
    input0: Any, input1: Any, input2: Any, input3: Any, input4: tf.Variable, name: str | None = None
) -> Any:
    """Applies a LAMB step: var ← var - ratio·lr·update, ratio = ‖w‖/‖update‖ if both norms are above 0, else 1.

    Args:
      input0, input1: ‖w‖ and ‖update‖.
      input2: learning rate.
      input3: update, the direction that `lamb_apply_optimizer_assign` returns.
      input4: variable var; updated in place.
      name: scope of the ops.
    Returns:
      The variable with its new value.
    Raises:
      TypeError: var is not a variable.
    """
    with tf.name_scope(name or "lamb_apply_weight_assign"):
        where = "npu_vector_ops.lamb_apply_weight_assign"
        return updates.lamb_step(input0, input1, input2, input3, input4, where)
