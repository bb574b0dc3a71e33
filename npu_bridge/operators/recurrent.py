"""Runs recurrent layers over all time steps: LSTM in one or both directions, GRU, and GRU with attention.

Tensors are time-major, and lengths int [B], or None for all steps. The part of a step that does not depend on the state
is computed for all steps at once before the loop, so the loop holds one small matrix product. Past the end of a
sequence its state stays, and every other output is 0.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Callable, NamedTuple

from npu_bridge.base.own_tensorflow import tf

GATE_ORDERS = ("zrh", "rzh")


class LstmState(NamedTuple):
    """The results of one LSTM step, each [B, H]: the state, the activated gates and tanh of the new cell."""

    h: tf.Tensor
    c: tf.Tensor
    i: tf.Tensor
    j: tf.Tensor
    f: tf.Tensor
    o: tf.Tensor
    tanh_c: tf.Tensor


class GruWeights(NamedTuple):
    """Weights of a GRU, the three gates side by side.

    Attributes:
      of_input: [D, 3H].
      of_hidden: [H, 3H].
      input_bias, hidden_bias: [3H].
    """

    of_input: Any
    of_hidden: Any
    input_bias: Any
    hidden_bias: Any


class GruRule(NamedTuple):
    """The way in which a GRU combines its gates.

    Attributes:
      gate_order: "zrh" or "rzh", the order of the columns: z updates, r resets.
      resets_after: whether the reset gate acts on the product with the hidden weights, or on the state before that.
    """

    gate_order: str
    resets_after: bool


def lstm_step(z: tf.Tensor, c: tf.Tensor, forget_bias: float) -> LstmState:
    """Computes one step from [x, h]·w + b, whose columns are the gates i, j, f and o.

    c' = σ(f + forget_bias)·c + σ(i)·tanh(j), h' = σ(o)·tanh(c').
    """
    i, j, f, o = tf.split(z, 4, axis=-1)
    i, j, f, o = tf.sigmoid(i), tf.tanh(j), tf.sigmoid(f + tf.cast(forget_bias, f.dtype)), tf.sigmoid(o)
    c = f * c + i * j
    tanh_c = tf.tanh(c)
    return LstmState(o * tanh_c, c, i, j, f, o, tanh_c)


def lstm(
    x: tf.Tensor, w: Any, b: Any, h: tf.Tensor, c: tf.Tensor, forget_bias: float, lengths: tf.Tensor | None
) -> list[tf.Tensor]:
    """Runs an LSTM over all steps of x [T, B, D]: y, h, c, i, j, f, o and tanh(c), each [T, B, H].

    w is [D + H, 4H], with the rows of the input first, b [4H], h and c the state before the first step, [B, H].
    """
    depth = x.shape.as_list()[2]
    w_hidden = w[depth:]

    def step(state, inputs):
        h, c = state
        new = lstm_step(inputs[0] + tf.matmul(h, w_hidden), c, forget_bias)
        return (new.h, new.c), (new.i, new.j, new.f, new.o, new.tanh_c)

    (h, c), gates = _over_time(step, (h, c), (tf.tensordot(x, w[:depth], 1) + b,), 5, lengths)
    return _until_end(h, lengths, (h, c), gates)


def lstm_both_ways(
    x: tf.Tensor, w: Any, b: Any, h: tf.Tensor, c: tf.Tensor, forget_bias: float, lengths: tf.Tensor | None
) -> list[tf.Tensor]:
    """Runs two LSTMs, the second from the end of each sequence to its start; w, b, h, c have a leading axis of 2.

    Returns the outputs of `lstm`, each [2, T, B, H]; those of the second LSTM are in the order of time, too.
    """

    def reverse(values):
        if lengths is None:
            return tf.reverse(values, [0])
        return tf.reverse_sequence(values, lengths, seq_axis=0, batch_axis=1)

    forwards = lstm(x, w[0], b[0], h[0], c[0], forget_bias, lengths)
    backwards = lstm(reverse(x), w[1], b[1], h[1], c[1], forget_bias, lengths)
    return [tf.stack([there, reverse(back)]) for there, back in zip(forwards, backwards)]


def gru(x: tf.Tensor, weights: GruWeights, h: tf.Tensor, rule: GruRule, lengths: tf.Tensor | None) -> list[tf.Tensor]:
    """Runs a GRU over all steps of x [T, B, D]: y, h, update, reset, new, the hidden part of new, each [T, B, H]."""
    y, h, update, _, *others = _gru(x, weights, h, rule, lengths, ())
    return [y, h, update, *others]


def attentional_gru(
    x: tf.Tensor, attention: tf.Tensor, weights: GruWeights, h: tf.Tensor, rule: GruRule, lengths: tf.Tensor | None
) -> list[tf.Tensor]:
    """Runs a `gru` with an update gate weakened by attention [T, B]; (1 - attention)·update follows update."""
    return _gru(x, weights, h, rule, lengths, (attention[..., tf.newaxis],))


def _gru(x, weights, h, rule, lengths, attention):
    of_hidden, hidden_bias = weights.of_hidden, weights.hidden_bias
    width = of_hidden.shape.as_list()[0]

    def step(state, inputs):
        (h,) = state
        of_input = tf.split(inputs[0], 3, axis=-1)
        if rule.resets_after:
            *of_gates, hidden_new = tf.split(tf.matmul(h, of_hidden) + hidden_bias, 3, axis=-1)
        else:
            of_gates = tf.split(tf.matmul(h, of_hidden[:, : 2 * width]) + hidden_bias[: 2 * width], 2, axis=-1)
        gates = {name: tf.sigmoid(of_input[i] + of_gates[i]) for i, name in enumerate(rule.gate_order[:2])}
        update, reset = gates["z"], gates["r"]
        if rule.resets_after:
            new = tf.tanh(of_input[2] + reset * hidden_new)
        else:
            hidden_new = tf.matmul(reset * h, of_hidden[:, 2 * width :]) + hidden_bias[2 * width :]
            new = tf.tanh(of_input[2] + hidden_new)
        weakened = (1 - inputs[1]) * update if attention else update
        return ((1 - weakened) * new + weakened * h,), (update, weakened, reset, new, hidden_new)

    of_inputs = tf.tensordot(x, weights.of_input, 1) + weights.input_bias
    (h,), gates = _over_time(step, (h,), (of_inputs, *attention), 5, lengths)
    return _until_end(h, lengths, (h,), gates)


def _over_time(
    step: Callable, state: Sequence[tf.Tensor], inputs: Sequence[tf.Tensor], outputs: int, lengths: tf.Tensor | None
) -> tuple[list[tf.Tensor], list[tf.Tensor]]:
    """Calls `step(state, inputs of this step)` for all steps; returns its states and outputs, stacked over time."""
    steps = tf.shape(inputs[0])[0]
    dtype = inputs[0].dtype
    read = [tf.TensorArray(values.dtype, steps).unstack(values) for values in inputs]
    written = [tf.TensorArray(dtype, steps) for _ in range(len(state) + outputs)]

    def body(time, state, written):
        new_state, produced = step(state, [values.read(time) for values in read])
        if lengths is not None:
            is_running = (time < tf.cast(lengths, tf.int32))[:, tf.newaxis]
            new_state = tuple(tf.where(is_running, new, old) for new, old in zip(new_state, state))
        values = (*new_state, *produced)
        return time + 1, new_state, [array.write(time, value) for array, value in zip(written, values)]

    _, _, written = tf.while_loop(lambda time, *_: time < steps, body, (tf.constant(0), tuple(state), written))
    stacked = [array.stack() for array in written]
    for values in stacked:
        values.set_shape(inputs[0].shape[:1].concatenate(state[0].shape))
    return stacked[: len(state)], stacked[len(state) :]


def _until_end(y, lengths, states, gates):
    """Returns y, states and gates; y and gates are 0 past the end of a sequence."""
    if lengths is not None:
        is_running = tf.transpose(tf.sequence_mask(lengths, tf.shape(y)[0]))[..., tf.newaxis]
        y, *gates = (tf.where(is_running, values, tf.zeros([], values.dtype)) for values in (y, *gates))
    return [y, *states, *gates]
