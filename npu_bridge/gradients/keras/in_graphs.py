"""Refuses a Keras optimizer that would not train in a TF 1 graph, and says what does."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

from npu_bridge.base.errors import message
from npu_bridge.base.own_tensorflow import tf
from npu_bridge.graph.operators import computed_ops
from npu_bridge.graph.variables import changed_variables

# How Keras 2.15 refuses a loss that is a tensor, in both generations, and how its current one names its step counter.
_REFUSAL = "`tape` is required"
_COUNTER = "iteration"
_MEND = (
    "Put NPUOptimizer or NPUDistributedOptimizer around it and call minimize(loss, global_step), or take an optimizer "
    "of tf.compat.v1.train."
)


@contextlib.contextmanager
def refusals_explained(owner: str) -> Iterator[None]:
    """Inside, a Keras optimizer that is asked to minimize a tensor says how it can; `owner` builds the graph.

    Raises:
      ValueError: instead of the one of Keras.
    """
    try:
        yield
    except ValueError as error:
        if _REFUSAL not in str(error):
            raise
        problem = "a Keras optimizer alone cannot take gradients of the loss of a TF 1 graph"
        expected = "an optimizer with compute_gradients(loss)"
        raise ValueError(message(owner, problem, expected, "a tf.keras.optimizers optimizer", _MEND)) from error


def check_train_op(train_op: Any, owner: str) -> None:
    """Refuses a training step that a Keras optimizer of the current generation made in a TF 1 graph by itself.

    Nothing refers to the update operators it makes there, so that running the step counts it and changes no variable.

    Args:
      train_op: what is run for a step; a tensor, an operator or a variable of the default graph.
    Raises:
      ValueError: the step is such a one.
    """
    ops = computed_ops([getattr(train_op, "op", train_op)])
    trainable = {variable.op.name for variable in tf.compat.v1.trainable_variables()}
    counters = (op.inputs[0].op.name for op in ops if op.type == "AssignAddVariableOp")
    counts = any(name.rpartition("/")[2].startswith(_COUNTER) for name in counters)
    if counts and not changed_variables(ops) & trainable:
        problem = "the train_op counts a step of a Keras optimizer and updates no variable"
        expected = "a step that trains"
        raise ValueError(message(owner, problem, expected, "what apply_gradients of a Keras optimizer gave", _MEND))
