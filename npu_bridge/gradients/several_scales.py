"""Arithmetic of gradients with several loss scales, one for each loss or group of variables."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from npu_bridge.gradients.arithmetic import has_finite_norm, in_true_units
from npu_bridge.gradients.stage import Step


def scale_in_common(scales: Any) -> tf.Tensor:
    """The scale of sums of gradients with several: the least of them, so that none overflows, but not below 1."""
    return tf.maximum(tf.reduce_min(tf.convert_to_tensor(scales)), 1.0)


def fine_scales(step: Step) -> dict:
    """Of each scale whose gradients were judged by themselves, whether it was right for this step.

    When the step is skipped although all of them were usable, their sum was not, and no scale was right.
    """
    if step.should_apply is None:
        return {number: tf.constant(True) for number in step.judged}
    if step.is_due is not None:  # the step is that of a window, of which other batches were judged before
        return step.judged
    all_usable = tf.reduce_all(tf.stack(list(step.judged.values())))
    blames_all = tf.logical_and(all_usable, tf.logical_not(step.should_apply))
    return {number: tf.logical_and(usable, tf.logical_not(blames_all)) for number, usable in step.judged.items()}


def add_loss(step: Step, grads_and_vars: Sequence, loss_id: int) -> None:
    """Adds the gradients of one loss to those that a step has, and judges them by themselves.

    Where there are several scales, sums have one scale in common, that of `step.loss_scale`; powers of two lose no
    bits on the way.
    """
    pairs = list(grads_and_vars)
    if len(step.scales) > 1:
        judge(step, loss_id, [grad for grad, _ in pairs if grad is not None], step.scales[loss_id])
        ratio = step.scales[loss_id] / step.loss_scale
        pairs = [(grad if grad is None else in_true_units(grad, ratio), variable) for grad, variable in pairs]
    step.grads_and_vars = sum_of_pairs(step.grads_and_vars, pairs)


def judge(step: Step, number: int, gradients: Sequence, scale: tf.Tensor) -> None:
    """Notes whether gradients that are multiplied by a scale can be used; those of one number all have to be."""
    usable = has_finite_norm([in_true_units(grad, scale) for grad in gradients])
    earlier = step.judged.get(number)
    step.judged[number] = usable if earlier is None else tf.logical_and(earlier, usable)


def sum_of_pairs(pairs: Sequence, others: Sequence) -> list:
    """Gradients added up by variable, in the order in which variables come first; sums of sparse ones are sparse."""
    if not pairs:
        return list(others)
    sums: dict = {}
    for grad, variable in [*pairs, *others]:
        earlier = sums.get(id(variable), (None, variable))[0]
        sums[id(variable)] = (_sum(earlier, grad), variable)
    return list(sums.values())


def _sum(first, second):
    if first is None or second is None:
        return second if first is None else first
    if not isinstance(first, tf.IndexedSlices) and not isinstance(second, tf.IndexedSlices):
        return first + second
    if isinstance(first, tf.IndexedSlices) and isinstance(second, tf.IndexedSlices):
        indices = [first.indices, second.indices]
        if first.indices.dtype != second.indices.dtype:
            indices = [tf.cast(rows, tf.int64) for rows in indices]
        shape = second.dense_shape if first.dense_shape is None else first.dense_shape
        return tf.IndexedSlices(tf.concat([first.values, second.values], 0), tf.concat(indices, 0), shape)
    dense, sparse = (second, first) if isinstance(first, tf.IndexedSlices) else (first, second)
    return tf.tensor_scatter_nd_add(dense, sparse.indices[:, tf.newaxis], sparse.values)
