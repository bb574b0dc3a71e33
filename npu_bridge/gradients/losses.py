"""Records the losses of one training step, their scales, and whether their gradients are finite; checks `loss_id`."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

from npu_bridge.base.arguments import check_count
from npu_bridge.base.errors import message, shown
from npu_bridge.base.own_tensorflow import tf
from npu_bridge.gradients.arithmetic import has_finite_norm, map_gradients, unscale_gradient


@dataclasses.dataclass
class Losses:
    """The losses of one step, and their scales.

    Attributes:
      values: the losses as the user computed them, in the order in which they were scaled.
      scaled: the scaled losses, whose gradients are computed.
      scales: float32 scalars, the loss scales of all losses, or of all groups of variables; empty without loss scaling.
      common_scale: the scale of sums of gradients of several losses; None without loss scaling.
      numbers: positions in `scales` of the losses, in the order of `values`.
      usable: by number of the loss or group, whether its gradients are finite. `OverflowCheck.each_batch` replaces this
        rank's answers by those of all ranks. Empty if gradients are checked only all together.
      sums_usable: in the last batch of an accumulation window, whether the unscaled sums of all its batches are finite.
        None in other batches, and if `usable` is empty.
      is_backward_by_optimizer: whether the optimizer itself computed the gradients, so no other code has used them.
    """

    values: list = dataclasses.field(default_factory=list)
    scaled: list = dataclasses.field(default_factory=list)
    scales: tuple = ()
    common_scale: tf.Tensor | None = None
    numbers: list = dataclasses.field(default_factory=list)
    usable: dict = dataclasses.field(default_factory=dict)
    sums_usable: tf.Tensor | None = None
    is_backward_by_optimizer: bool = False

    def record_finiteness(self, number: int, gradients: Sequence, scale: Any) -> None:
        """Records whether the gradients of a loss or group are finite: True only if all its recorded gradients are.

        Args:
          number: number of the loss or group.
          gradients: scaled gradients.
          scale: the loss scale of the gradients.
        """
        usable = has_finite_norm([unscale_gradient(grad, scale) for grad in gradients])
        earlier = self.usable.get(number)
        self.usable[number] = usable if earlier is None else tf.logical_and(earlier, usable)

    @property
    def latest(self) -> int:
        """The position in `scales` of the last loss that was scaled; 0 before the first."""
        return self.numbers[-1] if self.numbers else 0

    @property
    def verdicts(self) -> list:
        """The checks of single losses or groups and of the sums of a window, in a fixed order; empty without them."""
        return [*self.usable.values(), *([] if self.sums_usable is None else [self.sums_usable])]

    @verdicts.setter
    def verdicts(self, agreed: Sequence) -> None:
        self.usable = dict(zip(self.usable, agreed))
        if self.sums_usable is not None:
            self.sums_usable = agreed[-1]

    def convert_to_common_scale(self, grads_and_vars: Sequence, number: int) -> list:
        """Checks whether the gradients of one loss are finite, and converts them to the common scale.

        The conversion loses no bits if the scales are powers of two, unless a value becomes too small for its dtype.
        """
        pairs = list(grads_and_vars)
        if len(self.scales) < 2:
            return pairs
        self.record_finiteness(number, [grad for grad, _ in pairs if grad is not None], self.scales[number])
        ratio = self.scales[number] / self.common_scale
        converted = map_gradients(lambda _, grad: unscale_gradient(grad, ratio), [grad for grad, _ in pairs])
        return [(grad, variable) for grad, (_, variable) in zip(converted, pairs)]

    def find_scales_without_overflow(self, should_apply: tf.Tensor | None, is_due: tf.Tensor | None) -> dict:
        """Returns, for each loss or group in `usable`, whether its loss scale caused no overflow in this step.

        If the step is skipped although all these gradients are finite, their sum overflowed: every scale was too large.
        In a window, the sum of all batches can overflow in 16 bits; scales of earlier batches were reduced before.

        Args:
          should_apply: whether the update runs; None if gradients are not checked.
          is_due: whether the step ends a window; None without a window.
        """
        if should_apply is None:
            return {number: tf.constant(True) for number in self.usable}
        all_usable = tf.reduce_all(tf.stack(self.verdicts))
        if is_due is not None:
            all_usable = tf.logical_and(is_due, all_usable)
        blames_all = tf.logical_and(all_usable, tf.logical_not(should_apply))
        return {number: tf.logical_and(usable, tf.logical_not(blames_all)) for number, usable in self.usable.items()}


def smallest_scale(scales: Any) -> tf.Tensor:
    """Returns the scale for sums of gradients: the minimum of the scales, but at least 1.

    With the minimum, no term grows beyond its dtype. Below 1, small terms of other losses would lose bits.
    """
    return tf.maximum(tf.reduce_min(tf.convert_to_tensor(scales)), 1.0)


def check_loss_id(owner: str, loss_id: Any, managers: Sequence) -> int:
    """Checks that `loss_id` is the position of a loss-scale manager; accepts every integer without loss scaling.

    Raises:
      TypeError: `loss_id` is not an integer.
      ValueError: there is no manager at this position.
    """
    fix = "Leave loss_id out for the first manager."
    loss_id = check_count(owner, "loss_id", loss_id, fix, at_least=None, value_text="a manager's position")
    if not 0 <= loss_id < len(managers) and managers:
        problem, expected = "there is no loss-scale manager at this position", f"0 <= loss_id < {len(managers)}"
        fix = "Give the optimizer a list of managers, one for each loss."
        raise ValueError(message(owner, problem, expected, shown(loss_id), fix))
    return loss_id


def manager_positions(owner: str, count: int, loss_id: Any, managers: Sequence) -> list[int]:
    """Returns for each of several losses the position of its loss-scale manager.

    Args:
      owner: name of the caller, for messages.
      count: number of losses.
      loss_id: list with the position for each loss. None: every loss has its own manager, or all share a single one.
      managers: the loss-scale managers of the optimizer.
    Raises:
      TypeError: `loss_id` is not a list of integers.
      ValueError: there are no losses, or not as many positions or managers as losses.
    """
    if not count:
        raise ValueError(message(owner, "there is no loss", "one loss or more", "an empty list", "Pass a loss."))
    if loss_id is None:
        if len(managers) > 1 and count != len(managers):
            problem = "there are not as many losses as loss-scale managers"
            expected = f"{len(managers)} losses, or loss_id"
            fix = "Pass loss_id=[...] with the manager of each loss."
            raise ValueError(message(owner, problem, expected, f"{count} losses", fix))
        return list(range(count)) if len(managers) > 1 else [0] * count
    if not isinstance(loss_id, (list, tuple)) or len(loss_id) != count:
        kind = ValueError if isinstance(loss_id, (list, tuple)) else TypeError
        problem, expected = "loss_id does not fit the losses", f"a list of {count} positions"
        raise kind(
            message(
                owner, problem, expected, shown(loss_id), "Give the position of a loss-scale manager for each loss."
            )
        )
    return [check_loss_id(owner, number, managers) for number in loss_id]
