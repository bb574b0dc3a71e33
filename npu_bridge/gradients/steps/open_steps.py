"""Finds, for the gradients passed to `apply_gradients`, the step in which `compute_gradients` returned them."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

from npu_bridge.base.errors import message
from npu_bridge.base.own_tensorflow import tf
from npu_bridge.base.tf_internals.graphs import contexts_around
from npu_bridge.gradients.graph_mode import current_context, current_graph, enclosing_graphs
from npu_bridge.gradients.step import RankCheck, Step
from npu_bridge.graph.operators import ops_that_hold, sources_among, variable_ops_behind


class OpenSteps:
    """The steps of one optimizer whose gradients were computed and not yet applied.

    An optimizer returns gradients to its caller, and gets them back as plain pairs, possibly changed. In a graph or a
    function, this class finds the steps from whose gradients the given ones are computed, also in a branch inside.
    Eager execution does not record how a tensor was computed. There, gradients that the caller has changed are taken
    for those of the latest step with their variables. So a step that is never applied claims the next gradients of its
    variables, even if they come from a tape. No rule can tell them from changed ones.

    Args:
      trusts_variables: whether to recognise changed gradients by their variables in eager execution. False if it does
        no harm to pass gradients through the pipeline again.
    """

    def __init__(self, trusts_variables: bool = True):
        self._trusts_variables = trusts_variables
        self._steps: list[_OpenStep] = []
        self._variables_by_id: dict = {}  # of all steps; holds the variables, so that no id is used again

    def keep_step(self, step: Step, variables: Sequence[Any] | None, may_be_abandoned: bool = False) -> None:
        """Stores a step whose gradients went through the pipeline.

        Args:
          step: the step.
          variables: the variables of the gradients; None if unknown.
          may_be_abandoned: whether the caller can abandon the step without applying it, as the loss scaling of Keras
            does after an overflow. In eager execution `has_returned` then recognises the step by its gradients only.
        """
        known = None if variables is None else frozenset(map(id, variables))
        self._steps = [kept for kept in self._steps if kept.is_still_open(known)]
        self._steps.append(_OpenStep(current_graph(), step, known, may_be_abandoned, current_context()))
        self._variables_by_id.update((id(variable), variable) for variable in variables or ())

    def copy_step(self, grads_and_vars: Sequence, owner: str) -> Step | None:
        """Finds the step, of this graph or one around it, that made these gradients; returns a copy, and keeps it open.

        If the gradients were computed from those of several steps, for example as their sum, merges the steps. If the
        origin of the gradients is unknown, returns the latest step with all of their variables. It is unknown for eager
        gradients that the caller changed, and, in a graph, for values of variables or feeds. Ignores steps of a TF 1
        loop or branch that is closed: their tensors cannot be read from outside, and a branch that is not taken never
        computes them. Returns None if no step has all of the variables.

        Args:
          grads_and_vars: the pairs of `apply_gradients`.
          owner: name of the optimizer, for messages.
        """
        found = self._find_steps(grads_and_vars) or self._open_steps_with(grads_and_vars)[:1]
        return _merge_steps([kept.step for kept in found], owner) if found else None

    def note_applied(self, grads_and_vars: Sequence) -> None:
        """Notes an update of these variables: in eager execution, later gradients of them belong to another step."""
        if not tf.executing_eagerly():
            return
        ids = {id(variable) for _, variable in grads_and_vars}
        for kept in self._steps:
            if kept.variable_ids is not None and ids <= kept.variable_ids:
                kept.applied_ids |= ids
        for grad, variable in grads_and_vars:
            if grad is not None:
                self._variables_by_id.pop(id(variable), None)

    def foreign_variables(self, grads_and_vars: Sequence) -> list:
        """Returns the variables whose gradients the caller has computed: `compute_gradients` did not return them."""
        are_all_foreign = self._are_of_caller(grads_and_vars)
        trained = [variable for grad, variable in grads_and_vars if grad is not None]
        return [each for each in trained if are_all_foreign or id(each) not in self._variables_by_id]

    def _are_of_caller(self, grads_and_vars):
        """Returns whether the caller has computed these gradients of a graph or function from the variables themselves.

        Gradients that also read variables which are not trained can be sums that the caller keeps: returns False.
        """
        if tf.executing_eagerly() or tf.distribute.has_strategy():  # whose variables have a handle for each replica
            return False
        if _steps_that_returned(grads_and_vars, self._steps):
            return False
        read = variable_ops_behind([grad for grad, _ in grads_and_vars if grad is not None])
        given = ops_that_hold([variable for _, variable in grads_and_vars])
        return bool(read & given) and read <= given | ops_that_hold(tf.compat.v1.trainable_variables())

    def has_returned(self, grads_and_vars: Sequence) -> bool:
        """Returns whether steps returned these gradients, or gradients from which they are computed.

        Eager gradients that the caller changed are recognised by their variables, if `trusts_variables` is set.
        """
        found = self._find_steps(grads_and_vars)
        if not tf.executing_eagerly() or _steps_that_returned(grads_and_vars, self._steps):
            return bool(found)
        changed = found if self._trusts_variables else []
        ids = {id(variable) for _, variable in grads_and_vars}
        known = [kept.variable_ids or ids for kept in changed if not kept.may_be_abandoned]
        return bool(changed) and ids <= frozenset().union(*known)

    def remove_step(self, grads_and_vars: Sequence, owner: str) -> Step | None:
        """Closes the steps of gradients that went through the pipeline; returns them as one step, or None.

        Arguments and errors are those of `copy_step`.
        """
        found = self._find_steps(grads_and_vars)
        self._steps = [kept for kept in self._steps if kept not in found]
        return _merge_steps([kept.step for kept in found], owner) if found else None

    def _find_steps(self, grads_and_vars):
        """Returns the steps, newest first, that returned these gradients, or are assumed to have."""
        if tf.executing_eagerly() and (found := self._open_steps_with(grads_and_vars, a_part=True)):
            return found
        found = _steps_that_returned(grads_and_vars, self._open_steps_with([]))
        is_stored = not found and not tf.executing_eagerly() and _are_kept_in_variables(grads_and_vars)
        return self._open_steps_with(grads_and_vars)[:1] if is_stored else found

    def _open_steps_with(self, grads_and_vars, a_part=False):
        """Returns the steps, newest first, of this place and those around it that can have returned the gradients."""
        places, contexts = enclosing_graphs(), [None, *contexts_around(current_context())]
        here = [kept for kept in self._steps[::-1] if kept.place in places and kept.context in contexts]
        return [kept for kept in here if kept.can_include(grads_and_vars, a_part)]


@dataclasses.dataclass(eq=False)
class _OpenStep:
    place: Any
    step: Step
    variable_ids: frozenset | None
    may_be_abandoned: bool
    context: Any
    applied_ids: frozenset = frozenset()

    def is_still_open(self, newer_ids):
        """Returns False if the function of this step is finished, or if a newer eager step replaces this step."""
        if self.place is not current_graph():
            return self.place in enclosing_graphs()
        if self.place is not None:  # a graph can have several steps, and later apply them in any order
            return True
        return None not in (self.variable_ids, newer_ids) and not self.variable_ids & newer_ids

    def can_include(self, grads_and_vars, a_part=False):
        """Returns whether the step can have returned all of these gradients, or at least a part of them."""
        if self.variable_ids is None:
            return len(grads_and_vars) <= len(self.step.delivered)
        ids = {id(variable) for _, variable in grads_and_vars}
        if not ids.isdisjoint(self.applied_ids):
            return False
        return not ids.isdisjoint(self.variable_ids) if a_part else ids <= self.variable_ids


def _steps_that_returned(grads_and_vars, kept_steps):
    """Returns the steps that returned one of the gradients, or, in a graph, from whose gradients one is computed."""
    given = [grad for grad, _ in grads_and_vars if isinstance(grad, (tf.Tensor, tf.IndexedSlices))]
    returned = [grad for kept in kept_steps for grad in kept.step.delivered if grad is not None]
    used = set(map(id, given if tf.executing_eagerly() else sources_among(returned, given)))
    return [kept for kept in kept_steps if used.intersection(map(id, kept.step.delivered))]


def _are_kept_in_variables(grads_and_vars):
    """Returns whether gradients of a graph or function are read from other variables than those that they update."""
    if tf.distribute.has_strategy():  # whose variables have a handle for each replica
        return False
    read = variable_ops_behind([grad for grad, _ in grads_and_vars if grad is not None])
    return bool(read) and not read & ops_that_hold([variable for _, variable in grads_and_vars])


def _merge_steps(steps: Sequence[Step], owner: str) -> Step:
    """Returns one step for the gradients of several steps that are applied together, newest step first.

    Each loss scale changes by the gradients of its losses. Notes of stages are joined. Raises a ValueError if a stage
    has a note under the same key in two steps, or chooses the variables that a step trains.
    """
    if len(steps) == 1:
        return dataclasses.replace(steps[0], notes=dict(steps[0].notes), kept=dataclasses.replace(steps[0].kept))
    earlier_first = list(reversed(steps))
    merged = Step(losses=dataclasses.replace(steps[0].losses, usable={}))
    for name in ("values", "scaled", "numbers"):
        setattr(merged.losses, name, [each for step in earlier_first for each in getattr(step.losses, name)])
    for name in ("awaited", "in_float32", "state_updates"):
        setattr(merged.kept, name, [each for step in earlier_first for each in getattr(step.kept, name)])
    checks = [step.check for step in steps if step.check is not None]
    if len(checks) == len(steps):
        merged.check = RankCheck(
            functools.reduce(tf.logical_and, [each for check in checks for each in check.verdicts])
        )
    for step in earlier_first:
        merged.delivered += step.delivered
        if step.group is not None:
            raise _separate_steps_error(owner, "a stage that freezes variables")
        for key, note in step.notes.items():
            if key in merged.notes:
                raise _separate_steps_error(owner, type(key[0] if isinstance(key, tuple) else key).__name__)
            merged.notes[key] = note
        for number, usable in step.losses.usable.items():
            earlier = merged.losses.usable.get(number)
            merged.losses.usable[number] = usable if earlier is None else tf.logical_and(earlier, usable)
    return merged


def _separate_steps_error(owner, stage):
    problem, got = f"{stage} needs the gradients of each step apart", "gradients of several compute_gradients"
    fix = "Pass the losses as a list to one compute_gradients, or call apply_gradients for each."
    return ValueError(message(owner, problem, "gradients of one compute_gradients", got, fix))
