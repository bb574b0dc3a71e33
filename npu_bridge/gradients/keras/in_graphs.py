"""Rejects optimizers that would not train as written, and names an alternative.

These are Keras optimizers in a TF 1 graph, and TF 1 optimizers in an eager `fit`.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator
from typing import Any

from npu_bridge.base.errors import message
from npu_bridge.base.own_tensorflow import tf
from npu_bridge.base.tf_internals.training import create_all_weights
from npu_bridge.graph.operators import computed_ops
from npu_bridge.graph.variables import changed_variables

# How Keras 2.15 rejects a loss that is a tensor, in both generations, and how its current one names its step counter.
_KERAS_ERROR = "`tape` is required"
_COUNTER = "iteration"
_ADVICE = (
    "Wrap the optimizer in NPUOptimizer or NPUDistributedOptimizer and call minimize(loss, global_step), or use an "
    "optimizer of tf.compat.v1.train."
)


@contextlib.contextmanager
def explain_keras_refusal(owner: str) -> Iterator[None]:
    """Replaces, inside the context, the error of a Keras optimizer that cannot minimize a tensor by an explanation.

    Args:
      owner: name of the function that builds the graph, for the message.
    Raises:
      ValueError: the error that explains what to use instead.
    """
    try:
        yield
    except ValueError as error:
        if _KERAS_ERROR not in str(error):
            raise
        problem = "a Keras optimizer alone cannot take gradients of the loss of a TF 1 graph"
        expected = "an optimizer with compute_gradients(loss)"
        raise ValueError(message(owner, problem, expected, "an optimizer of tf.keras.optimizers", _ADVICE)) from error


def check_train_op(train_op: Any, owner: str) -> None:
    """Rejects a training step made in a TF 1 graph by a bare Keras optimizer of the current generation.

    Nothing refers to the update operators of such an optimizer, so its step increments a counter but changes no weight.

    Args:
      train_op: tensor, operator or variable of the default graph that runs one training step.
      owner: name of the function that builds the graph, for the message.
    Raises:
      ValueError: `train_op` increments a step counter of Keras and changes no trainable variable.
    """
    ops = computed_ops([getattr(train_op, "op", train_op)])
    trainable = {variable.op.name for variable in tf.compat.v1.trainable_variables()}
    counters = (op.inputs[0].op.name for op in ops if op.type == "AssignAddVariableOp")
    counts = any(name.rpartition("/")[2].startswith(_COUNTER) for name in counters)
    if counts and not changed_variables(ops) & trainable:
        problem = "the train_op increments the step counter of a Keras optimizer but updates no variable"
        expected = "a step that trains"
        raise ValueError(
            message(owner, problem, expected, "the result of a Keras optimizer's apply_gradients", _ADVICE)
        )


def build_optimizer(optimizer: Any, variables: Iterable) -> None:
    """Creates the slots of a Keras optimizer of any generation, unless it has them; rejects a wrapped TF 1 optimizer.

    Raises:
      ValueError: as `reject_in_eager_fit`.
    """
    if isinstance(optimizer, tf.keras.optimizers.legacy.Optimizer):
        create_all_weights(optimizer, variables)
    elif not hasattr(optimizer, "build"):  # Keras puts a wrapper without this method around a TF 1 optimizer
        reject_in_eager_fit(type(optimizer.optimizer).__name__)
    elif not getattr(optimizer, "built", False):
        optimizer.build(variables)


def reject_in_eager_fit(owner: str) -> None:
    """Rejects a TF 1 optimizer in an eager `fit`.

    Args:
      owner: name of the optimizer's class, for the message.
    Raises:
      ValueError: always.
    """
    problem = (
        "fit computes gradients without this optimizer, so they are not scaled, changed or averaged over the ranks"
    )
    expected, fix = "an optimizer of Keras", "Write npu_keras_optimizer(tf.keras.optimizers.Adam(...))."
    raise ValueError(message(owner, problem, expected, "an optimizer of tf.compat.v1.train", fix))
