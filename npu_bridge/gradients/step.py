"""Defines `Step`, the data of one training step that stages read and change, with its losses and its update."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any, Callable

from npu_bridge.base.flat_tensors import map_elementwise
from npu_bridge.base.own_tensorflow import tf
from npu_bridge.gradients.arithmetic import (
    as_gradient,
    backward_order_key,
    has_finite_norm,
    map_gradients,
    map_values,
    sum_gradients_by_variable,
    sum_repeated_rows,
    unscale_gradient,
)
from npu_bridge.gradients.graph_mode import make_tensors_if, run_if


@dataclasses.dataclass(frozen=True)
class TrainedGroup:
    """The group of variables that a step trains, for steps that do not train all variables.

    Attributes:
      number: number of the group, an int32 scalar; a Python number in eager execution.
      frozen: for every group, references of the variables that it does not train; group 0 trains all variables.
    """

    number: Any
    frozen: tuple

    def trains(self, variable: Any, number: int) -> bool:
        """Returns whether the group `number` trains a variable."""
        return variable.ref() not in self.frozen[number]


@dataclasses.dataclass(frozen=True)
class RankCheck:
    """The overflow check of this rank's gradients, for the decision about the step.

    Attributes:
      is_usable: boolean scalar, whether the gradients are usable on this rank.
      early_decision: boolean scalar, whether the checks of all ranks let the update run, known before the gradients are
        reduced; None without such a decision.
    """

    is_usable: Any
    early_decision: Any = None

    @property
    def verdicts(self) -> list:
        """The boolean scalars that must all be True for an update."""
        return [verdict for verdict in (self.is_usable, self.early_decision) if verdict is not None]


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


@dataclasses.dataclass
class PipelineValues:
    """The values of one step that a pipeline itself keeps between its calls.

    Attributes:
      awaited: operators that must run before the state of stages is read or changed.
      in_float32: 16-bit gradients that the caller gets, each with the float32 gradient that was rounded to it.
      state_updates: the updates of state that all parts of the step share, each with its losses, graph and TF 1
        context.
      overflow: whether an overflow skips the update, a boolean scalar; None before the first question.
    """

    awaited: list = dataclasses.field(default_factory=list)
    in_float32: list = dataclasses.field(default_factory=list)
    state_updates: list = dataclasses.field(default_factory=list)
    overflow: tf.Tensor | None = None


@dataclasses.dataclass
class Step:
    """The gradients of one training step and related values, which stages read and change.

    Attributes:
      grads_and_vars: list of (gradient, variable); a gradient is a tensor, `tf.IndexedSlices` or None.
      losses: the losses of the step and their loss scales.
      divisor: the factor by which the gradients are still multiplied, a Python number or a float32 scalar tensor. The
        gradients divided by `divisor` are in true units: unscaled, and averaged over the ranks. None if the gradients
        are in true units, as they are from `after_reduce` on. Only methods of this class change it.
      on_wire: the tensors that this rank sends, in the order of `grads_and_vars`: tensors, `tf.IndexedSlices` or Nones.
        Rows of equal index are added up, and values are rounded to 16 bits if requested. The tensors are still
        multiplied by `divisor`. The overflow check and the all-reduce both read these tensors. None if this rank sends
        nothing.
      check: the overflow check of this rank's gradients, usually of `on_wire`; None if they are not checked.
      should_apply: boolean scalar, whether the update of this step runs; None before `gate` has decided.
      delivered: the gradients that the pipeline returned to the caller, who can clip them before the update.
      group: the variables that this step trains; None if it trains all of them.
      is_due: boolean scalar, whether this step reduces and applies accumulated gradients; None if every step does so.
      notes: values that a stage stores for its later hooks, under a key of the stage. Values that are added or replaced
        between `before_reduce` and `after_reduce` must be tensors of known shapes, because they can be outputs of a
        condition.
      kept: the values that the pipeline keeps; stages do not use them.
    """

    grads_and_vars: list = dataclasses.field(default_factory=list)
    losses: Losses = dataclasses.field(default_factory=Losses)
    divisor: Any = None
    on_wire: list | None = None
    check: RankCheck | None = None
    should_apply: tf.Tensor | None = None
    delivered: list = dataclasses.field(default_factory=list)
    group: TrainedGroup | None = None
    is_due: tf.Tensor | None = None
    notes: dict = dataclasses.field(default_factory=dict)
    kept: PipelineValues = dataclasses.field(default_factory=PipelineValues)

    def __setattr__(self, name, value):
        if name == "grads_and_vars":
            value = [(as_gradient(grad, variable), variable) for grad, variable in value]
        super().__setattr__(name, value)

    @property
    def loss_scale(self) -> tf.Tensor | None:
        """The loss scale of this step (with several losses, of their sum), a float32 scalar; None without scaling."""
        return self.losses.common_scale

    @property
    def gradients(self) -> list:
        """The gradients that are not None."""
        return [grad for grad, _ in self.grads_and_vars if grad is not None]

    @property
    def variables_with_gradient(self) -> list:
        """The variables that have a gradient."""
        return [variable for grad, variable in self.grads_and_vars if grad is not None]

    def map(self, transform: Callable[[Any], Any]) -> None:
        """Replaces every gradient that is not None by `transform(gradient)`."""
        made = map_gradients(lambda _, grad: transform(grad), [grad for grad, _ in self.grads_and_vars])
        self.grads_and_vars = [(grad, variable) for grad, (_, variable) in zip(made, self.grads_and_vars)]

    def map_gradient_elements(self, transform: Callable[[tf.Tensor], tf.Tensor]) -> None:
        """Replaces the values of every gradient by `transform(values)`, an elementwise function.

        Rows of equal index are added up first, as in the dense gradient. Gradients that are combined into one flat
        tensor stay combined.
        """
        gradients = self.gradients
        order = sorted(range(len(gradients)), key=backward_order_key(gradients))
        dense = [gradients[position] for position in order if isinstance(gradients[position], tf.Tensor)]
        made = dict(zip(map(id, dense), map_elementwise(dense, transform)))
        self.map(
            lambda grad: (
                made[id(grad)] if isinstance(grad, tf.Tensor) else map_values(sum_repeated_rows(grad), transform)
            )
        )

    def add_gradients(self, grads_and_vars: Sequence, number: int) -> None:
        """Adds the gradients of one of several losses; `number` is the position of the loss and its scale."""
        self.grads_and_vars = sum_gradients_by_variable(
            self.grads_and_vars, self.losses.convert_to_common_scale(grads_and_vars, number)
        )

    def record_factor(self, factor: Any) -> None:
        """Records that the gradients are multiplied by one more factor."""
        self.divisor = factor if self.divisor is None else self.divisor * factor

    def mark_as_unscaled(self) -> None:
        """Records that the gradients are not multiplied by a factor."""
        self.divisor = None

    def tensors_if_due(self, make: Callable[[], list], otherwise: Callable[[], list]) -> list:
        """Returns the tensors of `make` if the step is due (it applies gradients), else the tensors of `otherwise`."""
        return make() if self.is_due is None else make_tensors_if(self.is_due, make, otherwise)

    def run_when_due(self, run: Callable[[], Any]) -> Any:
        """Runs an update only if the step is due: if it applies accumulated gradients. Returns the op."""
        return run() if self.is_due is None else run_if(self.is_due, run)

    def is_applied(self) -> tf.Tensor:
        """Returns whether this step updates variables, a boolean scalar; read it after `should_apply` was decided."""
        if self.should_apply is not None:
            return self.should_apply  # False in steps that are not due
        return tf.constant(True) if self.is_due is None else self.is_due

    def is_skipped(self) -> tf.Tensor:
        """Returns whether this step is due but skips its update; read it after `should_apply` was decided."""
        if self.is_due is None:
            return tf.logical_not(self.should_apply)
        return tf.not_equal(self.is_due, self.should_apply)  # no step that is not due is applied

    def overflow(self) -> tf.Tensor:
        """Returns whether an overflow skips the update of this step; the same tensor at each call."""
        if self.kept.overflow is None:
            self.kept.overflow = tf.constant(False) if self.should_apply is None else self.is_skipped()
        return self.kept.overflow


def narrow_to_dtypes_of(step: Step, given: Sequence) -> list:
    """Rounds float32 gradients back to the 16 bits that they had, for the caller of `compute_gradients`.

    Args:
      step: the step, with unscaled gradients.
      given: the gradients before they went through the pipeline, in the same order.
    Returns:
      A list of (rounded gradient, float32 gradient). The loss scale is already divided out of both, so the rounded one
      can be zero where the other is not.
    """
    pairs, rounded = [], []
    for (grad, variable), before in zip(step.grads_and_vars, given):
        if grad is not None and before is not None and before.dtype.size < grad.dtype.size:
            narrow = map_values(grad, functools.partial(tf.cast, dtype=before.dtype))
            rounded.append((narrow, grad))
            grad = narrow
        pairs.append((grad, variable))
    if rounded:
        step.grads_and_vars = pairs
    return rounded


def widen_again(step: Step, rounded: Sequence) -> None:
    """Replaces gradients that the caller has not changed by the float32 gradients of `narrow_to_dtypes_of`."""
    wide = {id(narrow): grad for narrow, grad in rounded}
    if wide:
        step.delivered = [wide.get(id(grad), grad) for grad in step.delivered]
        step.grads_and_vars = [(wide.get(id(grad), grad), variable) for grad, variable in step.grads_and_vars]


@dataclasses.dataclass(frozen=True)
class StepUpdate:
    """The update of one step. Calling the object runs the update and returns the op, or None in eager execution.

    Attributes:
      run: function that makes the update.
      variables: the variables that have a gradient.
      slots: function that creates missing slots of these variables and returns all of them.
    """

    run: Callable[[], Any]
    variables: Sequence[Any] = ()
    slots: Callable[[], list] = list

    def __call__(self) -> Any:
        return self.run()
