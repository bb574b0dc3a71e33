"""Variables that a stage keeps for each trained variable."""

from __future__ import annotations

from typing import Any, Callable

import tensorflow as tf

from npu_bridge.gradients.graph_mode import initialise_with_keras
from npu_bridge.options.errors import message


def kept_variable(variable: Any, owner: str, folder: str, dtype: tf.DType) -> tf.Variable:
    """Zeros in the shape of a trained variable, called and saved as `folder/name of that variable`.

    Args:
      variable: the trained variable.
      owner: the stage, for messages.
      folder: what the stage keeps.
      dtype: of the new variable.
    Raises:
      ValueError: the shape is not known.
    """
    if not variable.shape.is_fully_defined():
        problem = "what is kept for each variable needs a known shape"
        got = f"{variable.shape} for {variable.name}"
        raise ValueError(message(owner, problem, "a variable of known shape", got, "Give it a shape."))
    shape, name = variable.shape, variable.name.partition(":")[0]
    return state_variable(lambda: tf.zeros(shape, dtype), f"{folder}/{name}")


def state_variable(initial_value: Callable[[], tf.Tensor], name: str) -> tf.Variable:
    """A variable that is saved with the model, made outside any control flow or control dependency of the caller."""
    with tf.init_scope():
        made = tf.compat.v1.Variable(initial_value=initial_value, trainable=False, use_resource=True, name=name)
        initialise_with_keras([made])
    return made
