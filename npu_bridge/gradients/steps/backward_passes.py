"""Keeps a step between the scaling of its loss and its gradients; sums the gradients of several backward passes."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any, Callable

from npu_bridge.base.errors import message
from npu_bridge.base.tf_internals import keras3
from npu_bridge.gradients.arithmetic import sum_gradients_by_variable
from npu_bridge.gradients.graph_mode import current_graph, enclosing_graphs
from npu_bridge.gradients.pipeline import Pipeline
from npu_bridge.gradients.step import PipelineValues, Step


class ScaledSteps:
    """The steps of one optimizer whose loss is scaled and whose gradients are not computed yet.

    A caller that has its own tape scales a loss and later returns with the gradients alone.
    """

    def __init__(self):
        self._steps: list[_ScaledStep] = []

    def keep(self, step: Step) -> None:
        """Stores a step whose loss is scaled and whose gradients are not computed yet."""
        place = current_graph()
        losses = sum((kept.losses for kept in self._steps if kept.place is place and kept.is_open), 1)
        self._steps = [kept for kept in self._steps if kept.place is not place and kept.place in enclosing_graphs()]
        self._steps.append(_ScaledStep(place, step, losses))

    def remove(self, is_nested: bool = False, variables: Sequence = ()) -> Step | None:
        """Removes and returns the step whose loss was scaled in the current function or graph, or None.

        With `is_nested`, also takes a step of an enclosing function or graph, and keeps a copy for `reuse`.

        Args:
          is_nested: see above.
          variables: the variables of the gradients for which the step is taken.
        """
        for kept in self._steps_here(is_nested):
            if kept.is_open:
                self._steps.remove(kept)
                if is_nested:
                    copied = dataclasses.replace(kept.step, losses=dataclasses.replace(kept.step.losses))
                    self._steps.append(_ScaledStep(kept.place, copied, kept.losses - 1, {*map(id, variables)}))
                return kept.step
        return None

    def reuse(self, variables: Sequence) -> Step | None:
        """Returns a new step with the loss scale of a step that `remove` has returned, or None.

        In a function, all gradients have the scale of its loss. Eager gradients belong to a kept step if
        their variables are new to it, or if a scaled loss of it has no gradients yet.
        """
        ids = {*map(id, variables)}
        for kept in self._steps_here(is_nested=True):
            if kept.place is not None or kept.losses > 0 or ids.isdisjoint(kept.variable_ids):
                kept.losses -= 1
                kept.variable_ids |= ids
                losses = dataclasses.replace(kept.step.losses, usable={})
                return dataclasses.replace(kept.step, losses=losses, notes={}, kept=PipelineValues())
        return None

    def _steps_here(self, is_nested):
        places = enclosing_graphs() if is_nested else [current_graph()]
        return [kept for place in places for kept in self._steps if kept.place is place]

    @property
    def has_open(self) -> bool:
        """Whether there is a step, in any function, whose loss is scaled and whose gradients are not computed yet."""
        return any(kept.is_open for kept in self._steps)


@dataclasses.dataclass(eq=False)
class _ScaledStep:
    place: Any
    step: Step
    losses: int
    variable_ids: set | None = None

    @property
    def is_open(self):
        """Whether no gradients of the scaled loss have come yet."""
        return self.variable_ids is None


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
