"""Rejects a Keras optimizer that would not train in a TF 1 graph, and names an alternative."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

from npu_bridge.base.errors import message
from npu_bridge.base.own_tensorflow import tf
from npu_bridge.graph.operators import computed_ops
from npu_bridge.graph.variables import changed_variables

# How Keras 2.15 rejects a loss that is a tensor, in both generations, and how its current one names its step counter.
_REFUSAL = "`tape` is required"
_COUNTER = "iteration"
_MEND = (
    "Put NPUOptimizer or NPUDistributedOptimizer around it and call minimize(loss, global_step), or use an optimizer "
    "of tf.compat.v1.train."
)


@contextlib.contextmanager
def refusals_explained(owner: str) -> Iterator[None]:
    """Explains, inside the context, how a Keras optimizer can minimize a tensor; `owner` builds the graph.

    Raises:
      ValueError: in place of Keras' error.
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
    """Rejects a training step that a Keras optimizer of the current generation made in a TF 1 graph by itself.

    Nothing refers to the update operators it makes there, so running the step counts it but changes no variable.

    Args:
      train_op: the tensor, operator or variable of the default graph that is run for a step.
    Raises:
      ValueError: the step only counts.
    """
    ops = computed_ops([getattr(train_op, "op", train_op)])
    trainable = {variable.op.name for variable in tf.compat.v1.trainable_variables()}
    counters = (op.inputs[0].op.name for op in ops if op.type == "AssignAddVariableOp")
    counts = any(name.rpartition("/")[2].startswith(_COUNTER) for name in counters)
    if counts and not changed_variables(ops) & trainable:
        problem = "the train_op counts a step of a Keras optimizer and updates no variable"
        expected = "a step that trains"
        raise ValueError(message(owner, problem, expected, "the result of a Keras optimizer's apply_gradients", _MEND))
