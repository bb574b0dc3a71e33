"""Runs parts of a step: branches of a condition, and the updates of the stages' state.

A condition has a branch for steps that are due, or one for each trained group of variables. All branches must return
the same kinds of gradients, dense or sparse.
"""

from __future__ import annotations

import dataclasses
import functools
import operator
from collections.abc import Sequence
from typing import Any, Callable

from npu_bridge.base.own_tensorflow import tf
from npu_bridge.gradients.arithmetic import gradient_from_parts, gradient_parts, zero_gradient_like
from npu_bridge.gradients.graph_mode import current_context, current_graph, make_tensors_if, run_nth_function
from npu_bridge.gradients.stage import ReducingStage, ScalingStage, SelectingStage, Stage, SummingStage
from npu_bridge.gradients.step import RankCheck, Step


def make_update(step: Step, update: Callable[[list], Any]) -> Callable[[], Any]:
    """Returns a function without arguments that updates the variables which this step trains.

    Args:
      step: the step.
      update: function that updates the variables of a list of (gradient, variable) pairs.
    """
    if step.group is None:
        return functools.partial(update, step.grads_and_vars)

    def branch(number):
        return update([pair for pair in step.grads_and_vars if step.group.trains(pair[1], number)])

    branches = [functools.partial(branch, number) for number in range(len(step.group.frozen))]
    return lambda: run_nth_function(step.group.number, branches)


class BranchResults:
    """Converts the results of a step's stages to tensors that branches of a condition can return, and back."""

    def __init__(self, step: Step):
        self._given = step.grads_and_vars
        self._notes = step.notes
        self._made: Step | None = None

    def outputs_of(self, branch_step: Step) -> list:
        """Returns the tensors of a branch: overflow checks, notes of stages, and gradients or zeros.

        The first branch that is built has all gradients, and defines the tensors that every branch returns.
        """
        pairs = [
            (zero_gradient_like(given, variable) if grad is None and given is not None else grad, variable)
            for (grad, variable), (given, _) in zip(branch_step.grads_and_vars, self._reference_grads_and_vars())
        ]
        if self._made is None:
            new = {key: note for key, note in branch_step.notes.items() if self._notes.get(key) is not note}
            self._made = dataclasses.replace(branch_step, grads_and_vars=pairs, notes=new)
        noted = [branch_step.notes[key] for key in self._made.notes]
        return [
            *([] if branch_step.check is None else branch_step.check.verdicts),
            *noted,
            *(part for grad, _ in pairs if grad is not None for part in gradient_parts(grad)),
        ]

    def zero_outputs(self) -> list:
        """Returns the outputs of the branch without an all-reduce: False for checks, zeros for notes and gradients."""
        made = self._made
        if made is None:  # eager execution, where the other branch did not run
            self._made = made = Step(grads_and_vars=self._given)
        checks = [] if made.check is None else [tf.constant(False) for _ in made.check.verdicts]
        noted = [tf.zeros(tensor.shape, tensor.dtype) for tensor in made.notes.values()]
        zeros = [
            zero_gradient_like(grad, variable)
            for grad, variable in self._reference_grads_and_vars()
            if grad is not None
        ]
        return [*checks, *noted, *(part for grad in zeros for part in gradient_parts(grad))]

    def unpack(self, step: Step, tensors: list) -> None:
        """Sets the values of a step to the tensors of the branch that ran."""
        made, parts = self._made, iter(tensors)
        step.check = None if made.check is None else RankCheck(*(next(parts) for _ in made.check.verdicts))
        step.notes.update({key: next(parts) for key in made.notes})
        step.mark_as_unscaled()  # divided in the branch
        step.grads_and_vars = [
            (None if grad is None else gradient_from_parts(grad, variable, parts), variable)
            for grad, variable in made.grads_and_vars
        ]

    def _reference_grads_and_vars(self):
        return self._given if self._made is None else self._made.grads_and_vars


def run_part_if(is_run: tf.Tensor, step: Step, run: Callable[[Step], Any]) -> None:
    """Calls `run` with a copy of `step` if `is_run`; else dense gradients become zeros, sparse ones lose their rows."""
    if not step.gradients:
        run(step)
        return
    results = BranchResults(step)

    def branch():
        inside = dataclasses.replace(step, notes=dict(step.notes))
        run(inside)
        return results.outputs_of(inside)

    results.unpack(step, make_tensors_if(is_run, branch, results.zero_outputs))


def update_states(stages: Sequence[Stage], step: Step, results: Sequence) -> list[Any]:
    """Calls `after_update` of the stages, once for all parts in which a step is applied; returns the ops they made.

    Args:
      stages: the stages.
      step: the step; its gradients can be all of `Step.delivered` or a part of them.
      results: the results of the update; stages that are not needed early wait for them.
    """
    place, of_step = [step.losses, current_graph(), current_context()], step.kept.state_updates
    shared = next((ops for made_in, ops in of_step if all(map(operator.is_, made_in, place))), None)
    early, late = shared or [], []
    for stage in stages:
        # The next step of a loop can begin before the update of the last fragment. So stages whose state the next step
        # needs first do not wait for the update in a graph: they read no trained variables.
        is_early = isinstance(stage, (ScalingStage, SelectingStage, SummingStage, ReducingStage))
        if is_early and shared is not None:
            continue
        with tf.control_dependencies([*step.kept.awaited, *([] if is_early or tf.executing_eagerly() else results)]):
            made = stage.after_update(step)
        if made is not None:
            (early if is_early else late).append(made)
    if shared is None:
        of_step.append((place, early))
    return early + late
