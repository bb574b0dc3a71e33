"""Runs an RNN over time-major inputs."""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from npu_bridge.base.errors import message

__all__ = ["npu_dynamic_rnn"]


def npu_dynamic_rnn(
    cell: Any, inputs: Any, initial_state: Any = None, dtype: Any = None, sequence_length: Any = None, scope: Any = None
) -> tuple[tf.Tensor, Any]:
    """Runs a cell over all time steps, unrolled: variables and results are those of `tf.nn.static_rnn`.

    Args:
      cell: an RNN cell of TF 1.
      inputs: [T, B, ...] with known T.
      initial_state: state of the cell; None for zeros.
      dtype: dtype of the zeros; needed without `initial_state`.
      sequence_length: int [B]; past it outputs are 0 and the state stays. None for all steps.
      scope: variable scope; "rnn" by default.
    Returns:
      Outputs [T, B, H] and the final state of the cell.
    Raises:
      ValueError: T is unknown, or neither `initial_state` nor `dtype` is given.
    """
    inputs = tf.convert_to_tensor(inputs)
    if inputs.shape.rank is None or inputs.shape.as_list()[0] is None:
        fix = "Set it, or use tf.nn.dynamic_rnn with time_major=True."
        got = f"shape {inputs.shape}"
        raise ValueError(message("npu_dynamic_rnn", "the number of steps is unknown", "[T, B, ...]", got, fix))
    outputs, state = tf.compat.v1.nn.static_rnn(cell, tf.unstack(inputs), initial_state, dtype, sequence_length, scope)
    return tf.stack(outputs), state
