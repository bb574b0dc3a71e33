"""Defines an unrolled RNN over time-major inputs."""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from npu_bridge.base.errors import message

__all__ = ["npu_dynamic_rnn"]


def npu_dynamic_rnn(
    cell: Any, inputs: Any, initial_state: Any = None, dtype: Any = None, sequence_length: Any = None, scope: Any = None
) -> tuple[tf.Tensor, Any]:
    """Runs an RNN cell over all time steps with `tf.nn.static_rnn`, so that the graph is unrolled.

    Args:
      cell: an RNN cell of TF 1.
      inputs: tensor [T, B, ...] (time, batch, features) with a static T.
      initial_state: state of the cell; None for zeros.
      dtype: dtype of the initial zeros; required without `initial_state`.
      sequence_length: int [B]; after this step the outputs are 0 and the state does not change. None for all steps.
      scope: variable scope; "rnn" by default.
    Returns:
      Outputs [T, B, H] and the final state of the cell.
    Raises:
      ValueError: T is unknown, or neither `initial_state` nor `dtype` is given.
    """
    inputs = tf.convert_to_tensor(inputs)
    if inputs.shape.rank is None or inputs.shape.as_list()[0] is None:
        fix = "Set the static shape of inputs, or use tf.nn.dynamic_rnn with time_major=True."
        got = f"shape {inputs.shape}"
        raise ValueError(
            message(
                "npu_dynamic_rnn", "the number of time steps is unknown", "shape [T, B, ...] with known T", got, fix
            )
        )
    outputs, state = tf.compat.v1.nn.static_rnn(cell, tf.unstack(inputs), initial_state, dtype, sequence_length, scope)
    return tf.stack(outputs), state
