"""A last guard for variables of 16 bits, whose updates can overflow although their gradients are fine."""

from __future__ import annotations

import tensorflow as tf

from npu_bridge.gradients.graph_mode import building_graph
from npu_bridge.gradients.stage import Stage


class NarrowVariableGuard(Stage):
    """Keeps the old value of every element of a 16-bit variable or slot whose new value is not finite.

    An optimizer does its arithmetic in the dtype of the variable. In float16 the square of 300 is infinite and Adam's
    epsilon of 1e-8 is zero, so that a usable gradient can still make an Inf or a NaN. Variables of 32 and 64 bits are
    left alone, and cost nothing.
    """

    place = "guard"

    def gate(self, step, apply):
        updated = [variable for grad, variable in step.grads_and_vars if grad is not None]
        if not any(_is_narrow(variable) for variable in updated):
            return apply()
        narrow = [variable for variable in [*updated, *step.make_slots()] if _is_narrow(variable)]
        old_values = [_copy_of(variable) for variable in narrow]
        with tf.control_dependencies(old_values):
            update = apply()
        with tf.control_dependencies([] if update is None else [update]):
            kept = [variable.assign(_finite_or(variable, old)) for variable, old in zip(narrow, old_values)]
        return update if update is None or tf.executing_eagerly() else tf.group(update, *kept)


def _is_narrow(variable):
    dtype = variable.dtype.base_dtype
    return dtype.is_floating and dtype.size < tf.float32.size


def _copy_of(variable):
    value = tf.convert_to_tensor(variable)
    return tf.raw_ops.DeepCopy(x=value) if building_graph() else tf.identity(value)


def _finite_or(variable, old):
    new = variable.read_value()
    return tf.where(tf.math.is_finite(tf.cast(new, tf.float32)), new, old)
