"""Returns gradients from branches of a condition, which must all give the same kinds of tensors, dense or sparse."""

from __future__ import annotations

import dataclasses

import tensorflow as tf

from npu_bridge.gradients.arithmetic import nothing_like, parts_of, rebuilt
from npu_bridge.gradients.stage import Step


class BranchResults:
    """What stages make of the gradients of the step around several branches, of which one is run."""

    def __init__(self, step: Step):
        self._given = step.grads_and_vars
        self._made: Step | None = None

    def of(self, inside: Step) -> list:
        """The tensors of a branch: verdicts, what stages carry, and gradients; zeros where it has no gradient.

        The first step that comes from a branch says which tensors there are; it has all gradients.
        """
        pairs = [
            (nothing_like(given, variable) if grad is None and given is not None else grad, variable)
            for (grad, variable), (given, _) in zip(inside.grads_and_vars, self._like())
        ]
        if self._made is None:
            self._made = dataclasses.replace(inside, grads_and_vars=pairs)
        verdicts = [verdict for verdict in (inside.is_usable_here, inside.should_apply) if verdict is not None]
        carried = [inside.carried[key] for key in self._made.carried]
        return [*verdicts, *carried, *(part for grad, _ in pairs if grad is not None for part in parts_of(grad))]

    def nothing(self) -> list:
        """The tensors of a branch that makes nothing of the gradients."""
        made = self._made
        if made is None:  # executed eagerly, where the other branch was never run
            self._made = made = Step(grads_and_vars=self._given)
        verdicts = [tf.constant(False) for verdict in (made.is_usable_here, made.should_apply) if verdict is not None]
        carried = [tf.zeros(tensor.shape, tensor.dtype) for tensor in made.carried.values()]
        zeros = [nothing_like(grad, variable) for grad, variable in self._like() if grad is not None]
        return [*verdicts, *carried, *(part for grad in zeros for part in parts_of(grad))]

    def unpack(self, step: Step, tensors: list) -> None:
        """Gives a step the tensors of the branch that was run."""
        made, parts = self._made, iter(tensors)
        step.is_usable_here = None if made.is_usable_here is None else next(parts)
        step.should_apply = None if made.should_apply is None else next(parts)
        step.carried = {key: next(parts) for key in made.carried}
        step.divisor = None
        step.grads_and_vars = [
            (None if grad is None else rebuilt(grad, variable, parts), variable)
            for grad, variable in made.grads_and_vars
        ]

    def _like(self):
        return self._given if self._made is None else self._made.grads_and_vars
