"""Finds the step of gradients that `compute_gradients` returned and `apply_gradients` gets."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

from npu_bridge.base.own_tensorflow import tf
from npu_bridge.base.tf_internals.graphs import contexts_around, current_control_flow_context
from npu_bridge.gradients.stage import Step


class OpenSteps:
    """The steps of one optimizer whose gradients were computed and not yet applied.

    An optimizer returns gradients to its caller and gets them back, possibly changed, as plain pairs. Their step is
    found by the gradients or the variables, in the function (or graph, or eager execution) that made the step. A step
    of a Keras optimizer is also found in a branch inside that function, and is closed once it is taken. Gradients that
    are not recognised are averaged over the ranks again, which changes no mean; gradients recognised by mistake would
    never be averaged.
    """

    def __init__(self):
        self._scaled = []
        self._combined = []

    def keep_scaled(self, step: Step) -> None:
        """Keeps a step whose loss was scaled and whose gradients are not computed yet."""
        place = _place()
        self._scaled = [(other, kept) for other, kept in self._scaled if other is not place and other in _places()]
        self._scaled.append((place, step))

    def take_scaled(self, is_nested: bool = False) -> Step | None:
        """Removes and returns the step whose loss was scaled here (`is_nested`: or in a function around), or None."""
        places = _places() if is_nested else [_place()]
        for position, (place, step) in enumerate(self._scaled):
            if place in places:
                del self._scaled[position]
                return step
        return None

    @property
    def has_scaled(self) -> bool:
        """Whether a loss was scaled, here or elsewhere, and its gradients are not computed yet."""
        return bool(self._scaled)

    def keep(self, step: Step, variables: Sequence[Any] | None, may_be_left: bool = False) -> None:
        """Keeps a step whose gradients went through the pipeline.

        Args:
          step: the step.
          variables: the variables of its gradients; None when they are not known yet.
          may_be_left: whether the caller can leave the step and apply the next one, as Keras' own loss scaling does
            after an overflow. Executed eagerly, `find` then recognises the step by its gradients alone.
        """
        known = None if variables is None else frozenset(map(id, variables))
        self._combined = [kept for kept in self._combined if kept.is_still_open(known)]
        self._combined.append(_Kept(_place(), step, known, may_be_left, _context()))

    def latest_of(self, variables: Sequence[Any]) -> Step | None:
        """Returns the latest step made here for at least these variables, or None; the step stays open.

        Steps of a TF 1 loop or branch that was left are passed over: their tensors cannot be read, and a branch that is
        not taken never computes them.
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
        """Returns the step of these gradients, or None; the step stays open."""
        kept = self._search(grads_and_vars)
        if kept is not None and kept.may_be_left and kept.place is None and not kept.delivered_any_of(grads_and_vars):
            return None
        return kept and kept.step

    def take(self, grads_and_vars: Sequence) -> Step | None:
        """Closes and returns the step of these gradients, or returns None."""
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
        """Returns False when this place was left, or a newer step replaces this one."""
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
    """Returns the function or graph being built; None when executing eagerly."""
    return None if tf.executing_eagerly() else tf.compat.v1.get_default_graph()


def _context():
    """Returns the TF 1 condition or loop being built; None outside of these."""
    return None if tf.executing_eagerly() else current_control_flow_context(_place())


def _places():
    """Returns the function or graph being built and those around it, innermost first."""
    place, places = _place(), []
    while place is not None:
        places.append(place)
        place = getattr(place, "outer_graph", None)
    return places or [None]
