"""Holds the losses of one training step, their scales, and whether their gradients are finite."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

from npu_bridge.base.own_tensorflow import tf
from npu_bridge.gradients.arithmetic import has_finite_norm, in_true_units


@dataclasses.dataclass
class Losses:
    """The losses of one step, and their scales.

    Attributes:
      values: the losses as the user computed them, in the order in which they were scaled.
      scaled: the losses that were differentiated in their place.
      scales: float32 scalars, the loss scales of all losses, or of all groups of variables; empty without loss scaling.
      common_scale: the common scale of sums of gradients; None without loss scaling.
      latest: position of the scale of the loss that was scaled last.
      usable: whether the gradients of each loss or group are usable by themselves, by its number: on this rank, and on
        all ranks once these have agreed. Empty where the gradients are only judged as a whole.
      is_backward_own: the optimizer itself computed the gradients, so no other code uses them yet.
    """

    values: list = dataclasses.field(default_factory=list)
    scaled: list = dataclasses.field(default_factory=list)
    scales: tuple = ()
    common_scale: tf.Tensor | None = None
    latest: int = 0
    usable: dict = dataclasses.field(default_factory=dict)
    is_backward_own: bool = False

    def judge(self, number: int, gradients: Sequence, scale: Any) -> None:
        """Notes whether scaled gradients are usable; a number is usable when all gradients given for it are."""
        usable = has_finite_norm([in_true_units(grad, scale) for grad in gradients])
        earlier = self.usable.get(number)
        self.usable[number] = usable if earlier is None else tf.logical_and(earlier, usable)

    def with_common_scale(self, grads_and_vars: Sequence, number: int) -> list:
        """Judges the gradients of one loss by themselves, and converts them to the common scale.

        The conversion loses no bits, because scales are powers of two.
        """
        pairs = list(grads_and_vars)
        if len(self.scales) < 2:
            return pairs
        self.judge(number, [grad for grad, _ in pairs if grad is not None], self.scales[number])
        ratio = self.scales[number] / self.common_scale
        return [(grad if grad is None else in_true_units(grad, ratio), variable) for grad, variable in pairs]

    def right_scales(self, should_apply: tf.Tensor | None, is_due: tf.Tensor | None) -> dict:
        """Returns, for each scale whose gradients were judged by themselves, whether it was right for this step.

        If the step is skipped although all of them were usable, their sum overflowed, and no scale was right.
        """
        if should_apply is None:
            return {number: tf.constant(True) for number in self.usable}
        if is_due is not None:  # the step ends a window, whose earlier batches were judged before
            return self.usable
        all_usable = tf.reduce_all(tf.stack(list(self.usable.values())))
        blames_all = tf.logical_and(all_usable, tf.logical_not(should_apply))
        return {number: tf.logical_and(usable, tf.logical_not(blames_all)) for number, usable in self.usable.items()}


def least_scale(scales: Any) -> tf.Tensor:
    """Returns the scale of sums of gradients: the least of the scales, at least 1, so no term overflows."""
    return tf.maximum(tf.reduce_min(tf.convert_to_tensor(scales)), 1.0)


def sum_of_pairs(pairs: Sequence, others: Sequence) -> list:
    """Adds gradients up by variable, in the order in which variables first occur; sums of sparse ones are sparse."""
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
