"""Finds the step that gradients belong to, when `apply_gradients` gets what `compute_gradients` returned."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

from npu_bridge.base.own_tensorflow import tf
from npu_bridge.base.tf_internals.graphs import contexts_around, current_control_flow_context
from npu_bridge.gradients.stage import Step


class OpenSteps:
    """The steps of one optimizer whose gradients were computed and not yet applied.

    An optimizer hands gradients to its caller and takes them back, changed perhaps, as plain pairs. A step is found
    again by its gradients or its variables, in the function (or graph, or eager execution) that made it. Of a Keras
    optimizer it is also found in a branch inside, and gone once it is taken: gradients that are not recognised are
    averaged over the ranks once more, which changes no mean, whereas gradients wrongly recognised would never be.
    """

    def __init__(self):
        self._scaled = []
        self._combined = []

    def keep_scaled(self, step: Step) -> None:
        """Keeps a step whose loss was scaled; its gradients are still to come."""
        place = _place()
        self._scaled = [(other, kept) for other, kept in self._scaled if other is not place and other in _places()]
        self._scaled.append((place, step))

    def take_scaled(self, is_nested: bool = False) -> Step | None:
        """The step whose loss was scaled here, if there is one; with `is_nested` also in a function around this one."""
        places = _places() if is_nested else [_place()]
        for position, (place, step) in enumerate(self._scaled):
            if place in places:
                del self._scaled[position]
                return step
        return None

    @property
    def has_scaled(self) -> bool:
        """Whether there is a step whose loss was scaled, here or elsewhere."""
        return bool(self._scaled)

    def keep(self, step: Step, variables: Sequence[Any] | None, may_be_left: bool = False) -> None:
        """Keeps a step whose gradients, of `variables` if these are known yet, went through the pipeline.

        Args:
          may_be_left: its caller may never apply it and come with the gradients of the next step instead, as Keras'
            own loss scaling does after an overflow. Then, executed eagerly, `find` knows it by its gradients alone.
        """
        known = None if variables is None else frozenset(map(id, variables))
        self._combined = [kept for kept in self._combined if kept.is_still_open(known)]
        self._combined.append(_Kept(_place(), step, known, may_be_left, _context()))

    def latest_of(self, variables: Sequence[Any]) -> Step | None:
        """The latest step made here for at least these variables, or None; it stays open, to be applied again.

        Not one that was made in a TF 1 loop or branch that is left: its tensors cannot be read, and those of a branch
        that is not taken are never computed.
        """
        given = set(map(id, variables))
        contexts = [None, *contexts_around(_context())]
        here = [
            kept
            for kept in reversed(self._combined)
            if kept.place is _place() and kept.context in contexts and given <= kept.variable_ids
        ]
        return dataclasses.replace(here[0].step, notes=dict(here[0].step.notes)) if here else None

    def find(self, grads_and_vars: Sequence) -> Step | None:
        """The step these gradients belong to, or None; it stays open."""
        kept = self._search(grads_and_vars)
        if kept is not None and kept.may_be_left and kept.place is None and not kept.delivered_any_of(grads_and_vars):
            return None
        return kept and kept.step

    def take(self, grads_and_vars: Sequence) -> Step | None:
        """The step these gradients belong to, which ends its being open, or None."""
        kept = self._search(grads_and_vars)
        if kept is not None:
            self._combined.remove(kept)
        return kept and kept.step

    def _search(self, grads_and_vars):
        here = [kept for kept in reversed(self._combined) if kept.place in _places()]
        return next(
            (kept for kept in here if kept.delivered_any_of(grads_and_vars)),
            next((kept for kept in here if kept.may_cover(grads_and_vars)), None),
        )


@dataclasses.dataclass(eq=False)
class _Kept:
    place: Any
    step: Step
    variable_ids: frozenset | None
    may_be_left: bool
    context: Any

    def is_still_open(self, newer_ids):
        """False when this place is left, or a newer step here takes this one's place."""
        if self.place is not _place():
            return self.place in _places()
        if self.variable_ids is None or newer_ids is None:
            return self.place is not None  # eager steps come one after the other; a function is traced once
        return not self.variable_ids & newer_ids if self.place is None else not self.variable_ids <= newer_ids

    def delivered_any_of(self, grads_and_vars):
        delivered = {id(grad) for grad in self.step.delivered if grad is not None}
        return any(id(grad) in delivered for grad, _ in grads_and_vars)

    def may_cover(self, grads_and_vars):
        if self.variable_ids is None:
            return len(grads_and_vars) <= len(self.step.delivered)
        return {id(variable) for _, variable in grads_and_vars} <= self.variable_ids


def _place():
    """The function or graph being built; None when executing eagerly."""
    return None if tf.executing_eagerly() else tf.compat.v1.get_default_graph()


def _context():
    """The TF 1 condition or loop being built; None outside of these."""
    return None if tf.executing_eagerly() else current_control_flow_context(_place())


def _places():
    """That place and those around it, innermost first."""
    place, places = _place(), []
    while place is not None:
        places.append(place)
        place = getattr(place, "outer_graph", None)
    return places or [None]
