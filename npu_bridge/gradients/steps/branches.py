"""Runs parts of a step in branches of a condition, for `Freeze` and `Accumulate`.

A condition has a branch for steps that are due, or one for each trained group of variables. All branches must return
the same kinds of gradients, dense or sparse.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any, Callable

from npu_bridge.base.own_tensorflow import tf
from npu_bridge.gradients import collections
from npu_bridge.gradients.arithmetic import gradient_from_parts, gradient_parts, zero_gradient_like
from npu_bridge.gradients.graph_mode import choose_tensors, make_tensors_if, run_nth_function
from npu_bridge.gradients.step import RankCheck, Step


def make_update(step: Step, update: Callable[[list], Any]) -> Callable[[], Any]:
    """Returns a function without arguments that updates the variables which this step trains.

    In a TF 1 graph, the function records the operators that it adds: precision modes leave them in their own dtype.

    Args:
      step: the step.
      update: function that updates the variables of a list of (gradient, variable) pairs.
    """

    def branch(number):
        return update([pair for pair in step.grads_and_vars if step.group.trains(pair[1], number)])

    def run():
        with collections.record_update_operators():
            if step.group is None:
                return update(step.grads_and_vars)
            branches = [functools.partial(branch, number) for number in range(len(step.group.frozen))]
            return run_nth_function(step.group.number, branches)

    return run


class _BranchResults:
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
    results = _BranchResults(step)

    def branch():
        inside = dataclasses.replace(step, notes=dict(step.notes))
        run(inside)
        return results.outputs_of(inside)

    results.unpack(step, make_tensors_if(is_run, branch, results.zero_outputs))


def reduce_trained(step: Step, reduce: Callable[[Step], Any]) -> None:
    """Calls `reduce` with a copy of `step` that has the gradients of its group; other gradients become zeros."""
    if not step.gradients:
        reduce(step)
        return
    results = _BranchResults(step)

    def branch(number):
        trained = [(grad if step.group.trains(var, number) else None, var) for grad, var in step.grads_and_vars]
        inside = dataclasses.replace(step, grads_and_vars=trained, group=None, notes=dict(step.notes))
        reduce(inside)
        return results.outputs_of(inside)

    branches = [functools.partial(branch, number) for number in range(len(step.group.frozen))]
    results.unpack(step, choose_tensors(step.group.number, branches))
