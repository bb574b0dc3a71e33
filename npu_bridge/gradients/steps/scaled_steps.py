"""Finds, for gradients of a scaled loss, the step in which the loss was scaled."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

from npu_bridge.gradients.graph_mode import current_graph, enclosing_graphs
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
