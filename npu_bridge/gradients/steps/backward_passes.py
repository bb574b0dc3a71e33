"""Sums the gradients of several backward passes before one update: of several losses, or of one loss."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Callable

from npu_bridge.base.errors import message
from npu_bridge.base.tf_internals import keras3
from npu_bridge.gradients.arithmetic import sum_gradients_by_variable
from npu_bridge.gradients.pipeline import Pipeline
from npu_bridge.gradients.step import Step
from npu_bridge.gradients.steps.scaled_steps import ScaledSteps


class BackwardPasses:
    """The backward passes of one optimizer since its last update, in the current function or graph.

    Args:
      pipeline, scaled_steps: pipeline and scaled steps of the optimizer.
      combine: function of a step and its (gradient, variable) pairs that runs the pipeline after the last pass.
      owner: name of the optimizer's class, for messages.
    """

    def __init__(
        self, pipeline: Pipeline, scaled_steps: ScaledSteps, combine: Callable[[Step, list], list], owner: str
    ):
        self.pipeline = pipeline
        self._scaled_steps = scaled_steps
        self._combine = combine
        self._owner = owner

    def open_step(self) -> Step:
        """Returns the step to which backward passes are added; begins a new step after each update."""
        step = self._scaled_steps.remove() or self.pipeline.begin()
        self._scaled_steps.keep(step)
        return step

    def discard_passes(self) -> None:
        """Discards the passes since the last update."""
        self._scaled_steps.remove()

    def add(self, step: Step, grads_and_vars: Sequence, loss_id: int, delays_unscale: bool = False) -> None:
        """Adds the gradients of a backward pass to the step that `open_step` returned.

        Args:
          step: the open step.
          grads_and_vars: pairs with gradients that are multiplied by the scale of `loss_id`.
          loss_id: position of the loss-scale manager.
          delays_unscale: keep the gradients scaled, and add them to the gradients of the next pass of this `loss_id`.
        """
        delayed = step.notes.setdefault(self, {})  # gradients that are still scaled, by `loss_id`
        added = [(grad, keras3.tensorflow_variable_of(variable)) for grad, variable in grads_and_vars]
        pairs = sum_gradients_by_variable(delayed.pop(loss_id, []), added)
        if delays_unscale:
            delayed[loss_id] = pairs
        else:
            step.add_gradients(pairs, loss_id)

    def finish(self) -> list:
        """Returns the sum of the gradients of all passes, unscaled and averaged over the ranks.

        Raises:
          ValueError: there was no pass, or the last pass of a loss had `delays_unscale`.
        Ranks: collective where the pipeline communicates.
        """
        step = self._scaled_steps.remove()
        delayed = {} if step is None else step.notes.pop(self, {})
        if step is None or not (step.grads_and_vars or delayed):
            problem, expected = "there are no gradients", "a backward pass since the last update"
            fix = "Write `with scale_loss(loss, optimizer) as scaled: scaled.backward(tape, variables)` first."
            raise ValueError(message(self._owner, problem, expected, "no backward pass", fix))
        if delayed:
            problem = "the gradients of a backward pass are still multiplied by the loss scale"
            expected = "a pass with delay_unscale=False after the last pass with delay_unscale=True"
            got = f"no such pass with loss_id={next(iter(delayed))}"
            raise ValueError(message(self._owner, problem, expected, got, "Leave delay_unscale out in the last pass."))
        return self._combine(step, step.grads_and_vars)
