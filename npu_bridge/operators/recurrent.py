"""Runs recurrent layers over all time steps: LSTM in one or both directions, GRU, and GRU with attention.

Tensors are time-major. `lengths` is an integer vector [B], or None if every sequence has all steps. The part of a step
that does not depend on the state is computed before the loop, for all steps at once, so the loop holds one small matrix
product. After the end of a sequence, its state stays the same and all other outputs are 0.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Callable, NamedTuple

from npu_bridge.base.own_tensorflow import tf

GATE_ORDERS = ("zrh", "rzh")


class LstmState(NamedTuple):
    """The results of one LSTM step, each [B, H]: the state h and c, the activated gates i, j, f and o, and tanh(c)."""

    h: tf.Tensor
    c: tf.Tensor
    i: tf.Tensor
    j: tf.Tensor
    f: tf.Tensor
    o: tf.Tensor
    tanh_c: tf.Tensor


class GruWeights(NamedTuple):
    """The weights of a GRU. The columns of the three gates are side by side.

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
      gate_order: order of the gates in the columns, "zrh" or "rzh": z is the update gate, r the reset gate.
      resets_after: whether the reset gate multiplies the product of state and hidden weights; otherwise the state
        itself.
    """

    gate_order: str
    resets_after: bool


def lstm_step(z: tf.Tensor, c: tf.Tensor, forget_bias: float) -> LstmState:
    """Computes one LSTM step from z = [x, h]·w + b, whose columns are the gates i, j, f and o.

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
    """Runs an LSTM over all steps of x [T, B, D]; returns y, h, c, i, j, f, o and tanh(c), each [T, B, H].

    w is [D + H, 4H], with the rows for the input first; b is [4H]; h and c are the state before the first step, [B, H].
    """
    depth = x.shape.as_list()[2]
    w_hidden = w[depth:]

    def step(state, inputs):
        h, c = state
        new = lstm_step(inputs[0] + tf.matmul(h, w_hidden), c, forget_bias)
        return (new.h, new.c), (new.i, new.j, new.f, new.o, new.tanh_c)

    (h, c), gates = _scan_steps(step, (h, c), (tf.tensordot(x, w[:depth], 1) + b,), 5, lengths)
    return _mask_after_end(h, lengths, (h, c), gates)


def bidirectional_lstm(
    x: tf.Tensor, w: Any, b: Any, h: tf.Tensor, c: tf.Tensor, forget_bias: float, lengths: tf.Tensor | None
) -> list[tf.Tensor]:
    """Runs two LSTMs: one from the start of each sequence, one from its end. w, b, h and c have a leading axis of 2.

    Returns the outputs of `lstm`, each [2, T, B, H]; the outputs of both LSTMs are in the order of time.
    """

    def reverse(values):
        if lengths is None:
            return tf.reverse(values, [0])
        return tf.reverse_sequence(values, lengths, seq_axis=0, batch_axis=1)

    forwards = lstm(x, w[0], b[0], h[0], c[0], forget_bias, lengths)
    backwards = lstm(reverse(x), w[1], b[1], h[1], c[1], forget_bias, lengths)
    return [tf.stack([forward, reverse(backward)]) for forward, backward in zip(forwards, backwards)]


def gru(x: tf.Tensor, weights: GruWeights, h: tf.Tensor, rule: GruRule, lengths: tf.Tensor | None) -> list[tf.Tensor]:
    """Runs a GRU over x [T, B, D]; returns y, h, update, reset, new and the hidden part of new, each [T, B, H]."""
    y, h, update, _, *others = _run_gru(x, weights, h, rule, lengths, ())
    return [y, h, update, *others]


def attentional_gru(
    x: tf.Tensor, attention: tf.Tensor, weights: GruWeights, h: tf.Tensor, rule: GruRule, lengths: tf.Tensor | None
) -> list[tf.Tensor]:
    """Runs a `gru` whose update gate is multiplied by 1 - attention, which is [T, B].

    Returns the outputs of `gru`, and, inserted after `update`, the multiplied update gate.
    """
    return _run_gru(x, weights, h, rule, lengths, (attention[..., tf.newaxis],))


def _run_gru(x, weights, h, rule, lengths, attention):
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
    (h,), gates = _scan_steps(step, (h,), (of_inputs, *attention), 5, lengths)
    return _mask_after_end(h, lengths, (h,), gates)


def _scan_steps(
    step: Callable, state: Sequence[tf.Tensor], inputs: Sequence[tf.Tensor], outputs: int, lengths: tf.Tensor | None
) -> tuple[list[tf.Tensor], list[tf.Tensor]]:
    """Calls `step(state, inputs of the step)` for all steps; returns states and outputs, each stacked over time."""
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


def _mask_after_end(y, lengths, states, gates):
    """Returns y, states and gates in a list; sets y and gates to 0 after the end of a sequence."""
    if lengths is not None:
        is_running = tf.transpose(tf.sequence_mask(lengths, tf.shape(y)[0]))[..., tf.newaxis]
        y, *gates = (tf.where(is_running, values, tf.zeros([], values.dtype)) for values in (y, *gates))
    return [y, *states, *gates]
