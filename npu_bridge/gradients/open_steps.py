"""Finds, for the gradients passed to `apply_gradients`, the step in which `compute_gradients` returned them."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

from npu_bridge.base.own_tensorflow import tf
from npu_bridge.base.tf_internals.graphs import contexts_around, current_control_flow_context
from npu_bridge.gradients.step import Step, merge_steps
from npu_bridge.graph.operators import sources_among


class UnappliedSteps:
    """The steps of one optimizer whose gradients were computed and not yet applied.

    An optimizer returns gradients to its caller, and gets them back as plain pairs, possibly changed. This class finds
    the step of such pairs by the gradients or the variables, in the function (or graph, or eager execution) that made
    the step. A step of a Keras optimizer is also found in a branch inside that function, and is closed once it is
    taken. A Keras optimizer averages gradients that are not recognised; if they were averaged before, this does not
    change the mean. Gradients recognised by mistake would never be averaged. `PipelineOptimizer` does not average in
    `apply_gradients`.

    Args:
      keeps_older: whether a step of a graph stays open when a newer step has its variables, too. Two calls of
        `compute_gradients` can precede the two calls of `apply_gradients`.
    """

    def __init__(self, keeps_older: bool = False):
        self._keeps_older = keeps_older
        self._scaled = []
        self._combined = []

    def keep_scaled_step(self, step: Step) -> None:
        """Stores a step whose loss is scaled and whose gradients are not computed yet."""
        place = _current_graph()
        self._scaled = [
            (other, kept) for other, kept in self._scaled if other is not place and other in _enclosing_graphs()
        ]
        self._scaled.append((place, step))

    def remove_scaled_step(self, is_nested: bool = False) -> Step | None:
        """Removes and returns the step whose loss was scaled in the current function or graph, or None.

        With `is_nested`, also takes a step of an enclosing function or graph.
        """
        places = _enclosing_graphs() if is_nested else [_current_graph()]
        for position, (place, step) in enumerate(self._scaled):
            if place in places:
                del self._scaled[position]
                return step
        return None

    @property
    def has_scaled_step(self) -> bool:
        """Whether there is a step, in any function, whose loss is scaled and whose gradients are not computed yet."""
        return bool(self._scaled)

    def keep_step(self, step: Step, variables: Sequence[Any] | None, may_be_abandoned: bool = False) -> None:
        """Stores a step whose gradients went through the pipeline.

        Args:
          step: the step.
          variables: the variables of the gradients; None if unknown.
          may_be_abandoned: whether the caller can abandon the step without applying it, as the loss scaling of Keras
            does after an overflow. In eager execution `find` then recognises the step by its gradients only.
        """
        known = None if variables is None else frozenset(map(id, variables))
        # A step that replaces no variables of older steps of a graph leaves these open.
        replaced = frozenset() if self._keeps_older and not tf.executing_eagerly() else known
        self._combined = [kept for kept in self._combined if kept.is_still_open(replaced)]
        self._combined.append(_UnappliedStep(_current_graph(), step, known, may_be_abandoned, _current_context()))

    def copy_step(self, grads_and_vars: Sequence, owner: str) -> Step | None:
        """Returns a copy of the step, in the current function or graph, that returned these gradients; keeps it open.

        If the gradients were computed from those of several steps, for example as their sum, merges the steps. Eager
        gradients that the caller changed are taken for those of the latest step with their variables. So are gradients
        that were stored in variables. Ignores steps of a TF 1 loop or branch that is closed: their tensors cannot be
        read from outside, and a branch that is not taken never computes them. Returns None for gradients from
        elsewhere.

        Args:
          grads_and_vars: the pairs of `apply_gradients`.
          owner: name of the optimizer, for messages.
        """
        given = {id(variable) for _, variable in grads_and_vars}
        contexts = [None, *contexts_around(_current_context())]
        here = [
            kept for kept in reversed(self._combined) if kept.place is _current_graph() and kept.context in contexts
        ]
        covering = [kept for kept in here if given <= kept.variable_ids][:1]
        if tf.executing_eagerly():
            returning = [kept for kept in here if kept.has_returned_any_of(grads_and_vars)]
            sources = covering or returning or [kept for kept in here if given & kept.variable_ids]
        else:
            sources = _sources_of(grads_and_vars, here) or covering
        return merge_steps([kept.step for kept in sources], owner) if sources else None

    def find(self, grads_and_vars: Sequence) -> Step | None:
        """Returns the step of these gradients and keeps it open, or returns None."""
        kept = self._find_step(grads_and_vars)
        if (
            kept is not None
            and kept.may_be_abandoned
            and kept.place is None
            and not kept.has_returned_any_of(grads_and_vars)
        ):
            return None
        return kept and kept.step

    def remove_step(self, grads_and_vars: Sequence) -> Step | None:
        """Closes and returns the step of these gradients, or returns None."""
        kept = self._find_step(grads_and_vars)
        if kept is not None:
            self._combined.remove(kept)
        return kept and kept.step

    def _find_step(self, grads_and_vars):
        here = [kept for kept in reversed(self._combined) if kept.place in _enclosing_graphs()]
        return next(
            (kept for kept in here if kept.has_returned_any_of(grads_and_vars)),
            next((kept for kept in here if kept.can_include(grads_and_vars)), None),
        )


@dataclasses.dataclass(eq=False)
class _UnappliedStep:
    place: Any
    step: Step
    variable_ids: frozenset | None
    may_be_abandoned: bool
    context: Any

    def is_still_open(self, newer_ids):
        """Returns False if the function of this step is finished, or if a newer step replaces this step."""
        if self.place is not _current_graph():
            return self.place in _enclosing_graphs()
        if self.variable_ids is None or newer_ids is None:
            return self.place is not None  # eager steps follow each other; a function is traced once
        return not self.variable_ids & newer_ids if self.place is None else not self.variable_ids <= newer_ids

    def has_returned_any_of(self, grads_and_vars):
        delivered = {id(grad) for grad in self.step.delivered if grad is not None}
        return any(id(grad) in delivered for grad, _ in grads_and_vars)

    def can_include(self, grads_and_vars):
        if self.variable_ids is None:
            return len(grads_and_vars) <= len(self.step.delivered)
        return {id(variable) for _, variable in grads_and_vars} <= self.variable_ids


def _sources_of(grads_and_vars, kept_steps):
    """Returns the steps of a graph whose gradients are given, or have been used to compute the given gradients."""
    returned = [grad for kept in kept_steps for grad in kept.step.delivered if grad is not None]
    given = [grad for grad, _ in grads_and_vars if isinstance(grad, (tf.Tensor, tf.IndexedSlices))]
    used = {id(grad) for grad in sources_among(returned, given)}
    return [kept for kept in kept_steps if used.intersection(map(id, kept.step.delivered))]


def _current_graph():
    """Returns the current function or graph; None in eager execution."""
    return None if tf.executing_eagerly() else tf.compat.v1.get_default_graph()


def _current_context():
    """Returns the current TF 1 condition or loop; None outside of them."""
    return None if tf.executing_eagerly() else current_control_flow_context(_current_graph())


def _enclosing_graphs():
    """Returns the current function or graph and the enclosing ones, innermost first."""
    place, places = _current_graph(), []
    while place is not None:
        places.append(place)
        place = getattr(place, "outer_graph", None)
    return places or [None]
