"""Provides the operators of the documented interface, computed by TensorFlow.

All operators work in a TF 1 graph, in a `tf.function` and eagerly. `docs/operators.md` has the formulas.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

from npu_bridge import collective
from npu_bridge.base.errors import message, say_once
from npu_bridge.base.own_tensorflow import tf
from npu_bridge.operators import channels, dropping, positions, recurrent, updates
from npu_bridge.operators.unavailable import not_available_error
from npu_bridge.operators.updates import Moments

__all__ = [
    "LARS",
    "LARSV2",
    "NPUInit",
    "NPUShutdown",
    "adam_apply_one_assign",
    "adam_apply_one_with_decay_assign",
    "basic_lstm_cell",
    "channel_get_next",
    "dropout",
    "initialize_system",
    "k_means_centroids",
    "npu_onnx_graph_op",
    "outfeed_dequeue_op",
    "outfeed_enqueue_op",
    "scatter_elements",
    "shutdown_system",
    "stop_outfeed_dequeue_op",
]


def initialize_system(name: str | None = None) -> tf.Operation | None:
    """Starts the communication between ranks.

    Args:
      name: name of the op.
    Returns:
      A no-op for scripts to run; None in eager execution. The communication has started when this function returns.
    Ranks: with several ranks, Horovod starts here unless it already runs.
    """
    collective.current()
    return tf.no_op(name=name or "initialize_system")


def shutdown_system(name: str | None = None) -> tf.Operation | None:
    """Returns a no-op, because communication ends with the process; the counterpart of `initialize_system`."""
    return tf.no_op(name=name or "shutdown_system")


NPUInit = initialize_system
NPUShutdown = shutdown_system


def dropout(
    x: Any, keep_prob: Any, noise_shape: Any = None, seed: int | None = None, name: str | None = None, **others: Any
) -> tf.Tensor:
    """Applies dropout: keeps elements with probability `keep_prob`, divides them by it, and sets the others to 0.

    Elements are dropped in evaluation, too: pass `keep_prob=1.0` there. The gradient drops the same elements.

    Args:
      x: float tensor.
      keep_prob: probability to keep an element, a number in (0, 1] or a scalar tensor. 1.0 returns x itself.
      noise_shape: shape of the random mask, which broadcasts to x; None for the shape of x.
      seed: seed of the operator, as in TensorFlow.
      name: name of the op.
      **others: `is_training` or `training`, as in other dropout functions; accepted with a warning. False, or a boolean
        tensor that is False, keeps all elements.
    Returns:
      Tensor of the shape and dtype of x.
    Raises:
      ValueError: x is not a float tensor, or `keep_prob` is a number outside (0, 1].
      TypeError: another keyword is given.
    """
    for keyword in others:
        keep_prob = _keep_prob_if_training(keyword, others[keyword], keep_prob)
    return dropping.dropout(x, keep_prob, noise_shape, seed, name, "npu_ops.dropout")


def _keep_prob_if_training(keyword, is_training, keep_prob):
    if keyword not in ("is_training", "training"):
        raise TypeError(f"dropout() got an unexpected keyword argument {keyword!r}")
    text = f"npu_ops.dropout: {keyword} is not an argument on an NPU. Here {keyword}=False keeps every element. Pass "
    say_once(logging.WARNING, text + "keep_prob=1.0 instead, which works on NPUs, too.")
    if tf.is_tensor(is_training):
        return tf.where(tf.cast(is_training, tf.bool), tf.cast(keep_prob, tf.float32), 1.0)
    return keep_prob if is_training else 1.0


def LARSV2(  # noqa: N802 - the documented name
    input_weight: Any,
    input_grad: Any,
    weight_decay: Any,
    learning_rate: Any,
    hyperpara: float = 0.001,
    epsilon: float = 0.00001,
    use_clip: bool = False,
    name: str | None = None,
) -> tf.Tensor:
    """Scales a gradient by LARS: c·(g + weight_decay·w), c = hyperpara·‖w‖ / (‖g‖ + weight_decay·‖w‖ + epsilon).

    Args:
      input_weight, input_grad: weight w and gradient g.
      weight_decay, learning_rate: scalars. The result is not multiplied by the learning rate.
      hyperpara, epsilon: as in the formula.
      use_clip: whether c is divided by the learning rate and clipped to [0, 1].
      name: scope of the ops.
    Returns:
      Tensor of the shape of the weight.
    """
    with tf.name_scope(name or "LARSV2"):
        rate = learning_rate if use_clip else None
        return updates.lars_gradient(input_weight, input_grad, weight_decay, hyperpara, epsilon, rate)


def LARS(  # noqa: N802 - the documented name
    inputs_w: Sequence[Any],
    inputs_g: Sequence[Any],
    weight_decay: Any,
    hyperpara: float = 0.001,
    epsilon: float = 0.00001,
    name: str | None = None,
) -> list[tf.Tensor]:
    """Applies the rule of `LARSV2` without clipping to lists of weights and gradients.

    Returns:
      List of scaled gradients.
    Raises:
      ValueError: the lists differ in length.
    """
    if len(inputs_w) != len(inputs_g):
        got = f"{len(inputs_w)} weights and {len(inputs_g)} gradients"
        raise ValueError(
            message("npu_ops.LARS", "the lists differ in length", "pairs", got, "Pass a gradient for each weight.")
        )
    with tf.name_scope(name or "LARS"):
        return [
            updates.lars_gradient(weight, gradient, weight_decay, hyperpara, epsilon)
            for weight, gradient in zip(inputs_w, inputs_g)
        ]


def basic_lstm_cell(
    x: Any,
    h: Any,
    c: Any,
    w: Any,
    b: Any,
    keep_prob: float,
    forget_bias: float,
    state_is_tuple: bool,
    activation: str,
    name: str | None = None,
) -> tuple[tf.Tensor, ...]:
    """Computes an LSTM step: [x, h]·w + b holds the gates i, j, f, o; c' = σ(f + forget_bias)·c + σ(i)·tanh(j).

    Args:
      x: input [B, D].
      h, c: output and state of the previous step, [B, H].
      w: weights [D + H, 4H].
      b: bias [4H].
      keep_prob: must be 1.
      forget_bias: number added to f.
      state_is_tuple: accepted for compatibility.
      activation: must be "tanh".
      name: scope of the ops.
    Returns:
      Seven tensors: c', h' = tanh(c')·σ(o), the activated gates i, j, f and o, and tanh(c').
    Raises:
      ValueError: `keep_prob` is not 1, or `activation` is not "tanh".
    """
    where = "npu_ops.basic_lstm_cell"
    if keep_prob != 1:
        fix = "Apply npu_ops.dropout to the output h."
        raise ValueError(message(where, "keep_prob has an unsupported value", "1", repr(keep_prob), fix))
    if activation != "tanh":
        fix = "Use a cell of tf.keras."
        raise ValueError(message(where, "activation has an unsupported value", "'tanh'", repr(activation), fix))
    with tf.name_scope(name or "basic_lstm_cell"):
        z = tf.matmul(tf.concat([x, h], axis=1), w) + b
        new = recurrent.lstm_step(z, tf.convert_to_tensor(c), forget_bias)
    return (new.c, new.h, new.i, new.j, new.f, new.o, new.tanh_c)


def adam_apply_one_assign(
    input0: Any,
    input1: tf.Variable,
    input2: tf.Variable,
    input3: tf.Variable,
    input4: Any,
    mul0_x: Any,
    mul1_x: Any,
    mul2_x: Any,
    mul3_x: Any,
    add2_y: Any,
    name: str | None = None,
) -> tf.Operation | None:
    """Applies Adam without bias correction: m ← β1·m + (1-β1)·g, v ← β2·v + (1-β2)·g², var ← var - lr·m/(√v + ε).

    Args:
      input0: gradient g.
      input1, input2, input3: variables v, m and var; updated in place.
      input4: learning rate.
      mul0_x, mul1_x, mul2_x, mul3_x: β1, 1-β1, β2, 1-β2.
      add2_y: ε.
      name: scope of the ops.
    Returns:
      The op to run; None in eager execution, where the step is already done.
    Raises:
      TypeError: `input1`, `input2` or `input3` is not a variable.
    """
    where = "npu_ops.adam_apply_one_assign"
    with tf.name_scope(name or "adam_apply_one_assign"):
        moments = Moments(mul0_x, mul1_x, mul2_x, mul3_x)
        return updates.adam_step((input1, input2, input3), input0, input4, moments, add2_y, None, where)


def adam_apply_one_with_decay_assign(
    input0: Any,
    input1: tf.Variable,
    input2: tf.Variable,
    input3: tf.Variable,
    input4: Any,
    mul0_x: Any,
    mul1_x: Any,
    mul2_x: Any,
    mul3_x: Any,
    mul4_x: Any,
    add2_y: Any,
    name: str | None = None,
) -> tf.Operation | None:
    """Applies Adam as `adam_apply_one_assign`, with weight decay `mul4_x`: var ← var - lr·(m/(√v + ε) + mul4_x·var)."""
    where = "npu_ops.adam_apply_one_with_decay_assign"
    with tf.name_scope(name or "adam_apply_one_with_decay_assign"):
        moments = Moments(mul0_x, mul1_x, mul2_x, mul3_x)
        return updates.adam_step((input1, input2, input3), input0, input4, moments, add2_y, mul4_x, where)


def scatter_elements(data: Any, indices: Any, updates: Any, axis: int = 0, name: str | None = None) -> tf.Tensor:
    """Returns a copy of data in which single elements are replaced; for axis 0, out[indices[i, j], j] = updates[i, j].

    Args:
      data: tensor.
      indices: integer tensor of the rank of data.
      updates: tensor of the shape of indices.
      axis: the axis of data to which the indices refer.
      name: scope of the ops.
    Raises:
      ValueError: indices and updates differ in shape, or data lacks the axis.
    """
    with tf.name_scope(name or "scatter_elements"):
        return positions.scatter_elements(data, indices, updates, axis, "npu_ops.scatter_elements")


def k_means_centroids(
    x: Any, y: Any, sum_square_y: Any, sum_square_x: Any, use_actual_distance: bool = False, name: str | None = None
) -> tuple[tf.Tensor, tf.Tensor, tf.Tensor]:
    """Assigns each row of x to the nearest centroid, and sums the rows of each centroid.

    Args:
      x: rows [m, d].
      y: centroids [n, d].
      sum_square_y: [1, n], ‖centroid‖².
      sum_square_x: [m, 1], ‖row‖².
      use_actual_distance: whether ‖row‖² is part of the distance.
      name: scope of the ops.
    Returns:
      For each centroid the sum of its rows [n, d] and the number of its rows [n, 1]; the total squared distance [1].
    """
    with tf.name_scope(name or "k_means_centroids"):
        return positions.k_means_step(x, y, sum_square_y, sum_square_x if use_actual_distance else None)


def npu_onnx_graph_op(inputs: Any, tout: Any, model_path: str, name: str | None = None) -> Any:
    """Raises NotImplementedError: this operator needs the device. Use ONNX Runtime in a `tf.numpy_function` instead."""
    alternative = "Convert the model to TensorFlow, or run it with ONNX Runtime in a tf.numpy_function."
    raise not_available_error("npu_ops.npu_onnx_graph_op", "an ONNX file that the device runs", alternative)


def outfeed_enqueue_op(channel_name: str, inputs: Sequence[Any], name: str | None = None) -> tf.Operation | None:
    """Writes tensors to a channel, from which any other graph of the process can read them.

    Args:
      channel_name: name of the channel, which is created at its first use.
      inputs: list of tensors.
      name: scope of the op.
    Returns:
      The op to run; None in eager execution, where the op has already run.
    """
    with tf.name_scope(name or "outfeed_enqueue"):
        return channels.write_to_channel(channel_name, inputs)


def outfeed_dequeue_op(
    channel_name: str, output_types: Sequence[Any], output_shapes: Sequence[Any], name: str | None = None
) -> list[tf.Tensor]:
    """Reads tensors from a channel, and waits until the channel has some.

    A waiting read occupies one of the threads that run operators, so end every channel with `stop_outfeed_dequeue_op`.
    The channel `_npu_log` is always at its end: prints go to standard error instead.

    Args:
      channel_name: name of the channel.
      output_types: list of dtypes.
      output_shapes: list of shapes.
      name: scope of the op.
    Returns:
      List of tensors. Running them after the end of the channel raises `tf.errors.OutOfRangeError`.
    """
    with tf.name_scope(name or "outfeed_dequeue"):
        return channels.read_from_channel(channel_name, output_types, output_shapes)


def channel_get_next(channel_name: str, output_types: Sequence[Any], output_shapes: Sequence[Any]) -> list[tf.Tensor]:
    """Reads tensors from a channel; another name of `outfeed_dequeue_op`."""
    return outfeed_dequeue_op(channel_name, output_types, output_shapes)


def stop_outfeed_dequeue_op(channel_name: str, name: str | None = None) -> tf.Operation | None:
    """Ends a channel: a read after its last tensors raises `tf.errors.OutOfRangeError`.

    Returns:
      The op to run; None in eager execution, where the op has already run.
    """
    with tf.name_scope(name or "stop_outfeed_dequeue"):
        return channels.end_channel(channel_name)
