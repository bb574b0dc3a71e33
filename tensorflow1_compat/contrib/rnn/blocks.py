"""Defines LSTM and GRU block cells.

TensorFlow 1.15 computed a step of these cells in one kernel. These kernels have no gradient in TensorFlow 2, so single
operators replace them. The kernel for a whole sequence of LSTM steps has a gradient, and is used.
"""

from __future__ import annotations

import tensorflow.compat.v1 as tf

from tensorflow1_compat.contrib.rnn.cells import _OneStateCell, _TwoStateCell
from tensorflow1_compat.contrib.rnn.loops import FusedRNNCell

LSTMStateTuple = tf.nn.rnn_cell.LSTMStateTuple


class _LSTMBlockOptions:
    """A mixin with the variables of an LSTM cell: `kernel`, `bias` and optional peepholes."""

    def _set_options(self, num_units, forget_bias, cell_clip, use_peephole):
        self._num_units, self._forget_bias, self._use_peephole = num_units, forget_bias, use_peephole
        self._cell_clip = -1 if cell_clip is None else cell_clip

    def build(self, inputs_shape):
        shape = inputs_shape[0] if isinstance(inputs_shape, list) else inputs_shape  # of each step, or of all
        width = tf.compat.dimension_value(shape[-1])
        self._kernel = self.add_variable("kernel", [width + self._num_units, 4 * self._num_units])
        self._bias = self.add_variable("bias", [4 * self._num_units], initializer=tf.zeros_initializer())
        self._peepholes = [
            self.add_variable(name, [self._num_units]) for name in ("w_i_diag", "w_f_diag", "w_o_diag")
            if self._use_peephole
        ]  # fmt: skip
        self.built = True


class LSTMBlockCell(_LSTMBlockOptions, _TwoStateCell):
    """An LSTM cell with optional peepholes.

    Its variables are `kernel` [input + units, 4 * units] and `bias`, with the gates in the order i, c, f, o.

    Args:
      num_units: width of the state.
      cell_clip: bound of the cell state; None for no bound.
      use_peephole: whether the gates also read the cell state (variables `w_i_diag`, `w_f_diag`, `w_o_diag`).
    """

    def __init__(
        self, num_units, forget_bias=1.0, cell_clip=None, use_peephole=False, dtype=None, reuse=None, name="lstm_cell"
    ):
        super().__init__(_reuse=reuse, dtype=dtype, name=name)
        self._set_options(num_units, forget_bias, cell_clip, use_peephole)

    def call(self, inputs, state):
        before, h = state
        gates = tf.nn.bias_add(tf.matmul(tf.concat([inputs, h], 1), self._kernel), self._bias)
        i, new, f, o = tf.split(gates, 4, 1)
        if self._use_peephole:
            w_ci, w_cf, w_co = self._peepholes
            i, f = i + before * w_ci, f + before * w_cf
        c = tf.sigmoid(f + self._forget_bias) * before + tf.sigmoid(i) * tf.tanh(new)
        if self._cell_clip > 0:
            # As in the kernel, the gradient ignores the bound.
            c = tf.grad_pass_through(lambda cell: tf.clip_by_value(cell, -self._cell_clip, self._cell_clip))(c)
        if self._use_peephole:
            o = o + c * w_co
        h = tf.sigmoid(o) * tf.tanh(c)
        return h, LSTMStateTuple(c, h)


class LSTMBlockWrapper(tf.layers.Layer, FusedRNNCell):
    """A base class of fused LSTM cells; `_call_cell(inputs, c, h, dtype, sequence_length)` computes all steps."""

    @property
    def num_units(self):
        raise NotImplementedError

    def call(self, inputs, initial_state=None, dtype=None, sequence_length=None):
        """Runs all steps of inputs [time, batch, width] or a list over time.

        Returns:
          (outputs [time, batch, units], final state (c, h)).
        """
        is_list = isinstance(inputs, list)
        inputs = tf.stack(inputs) if is_list else inputs
        dtype = dtype or inputs.dtype
        batch, time = tf.shape(inputs)[1], tf.shape(inputs)[0]
        if initial_state is None:
            initial_state = (tf.zeros([batch, self.num_units], dtype),) * 2
        c_start, h_start = initial_state
        lengths = None if sequence_length is None else tf.cast(sequence_length, tf.int32)
        cells, outputs = self._call_cell(inputs, c_start, h_start, dtype, lengths)
        if lengths is None:
            final = LSTMStateTuple(cells[-1], outputs[-1])
        else:
            outputs = outputs * tf.transpose(tf.sequence_mask(lengths, time, dtype))[:, :, None]
            places = tf.stack([lengths, tf.range(batch)], 1)
            final = LSTMStateTuple(
                tf.gather_nd(tf.concat([c_start[None], cells], 0), places),
                tf.gather_nd(tf.concat([h_start[None], outputs], 0), places),
            )
        return (tf.unstack(outputs) if is_list else outputs), final


class LSTMBlockFusedCell(_LSTMBlockOptions, LSTMBlockWrapper):
    """An LSTM like `LSTMBlockCell` that runs all time steps in one operator."""

    def __init__(
        self, num_units, forget_bias=1.0, cell_clip=None, use_peephole=False, reuse=None, dtype=None,
        name="lstm_fused_cell",
    ):  # fmt: skip
        super().__init__(_reuse=reuse, name=name, dtype=dtype)
        self._set_options(num_units, forget_bias, cell_clip, use_peephole)

    @property
    def num_units(self):
        return self._num_units

    def _call_cell(self, inputs, c_start, h_start, dtype, lengths):
        longest = tf.cast(tf.shape(inputs)[0] if lengths is None else tf.reduce_max(lengths), tf.int64)
        _, cells, _, _, _, _, outputs = _block_lstm(
            longest, inputs, self._kernel, self._bias, c_start, h_start, *(self._peepholes or [None] * 3),
            self._forget_bias, self._cell_clip, self._use_peephole,
        )  # fmt: skip
        return cells, outputs


def _block_lstm(
    seq_len_max, x, w, b, cs_prev=None, h_prev=None, wci=None, wcf=None, wco=None, forget_bias=1.0, cell_clip=-1,
    use_peephole=False, name=None,
):  # fmt: skip
    """Runs an LSTM over `x` [time, batch, width] or a list over time; returns (i, cs, f, o, ci, co, h) of all steps."""
    x = tf.stack(x) if isinstance(x, (list, tuple)) else x
    units = tf.compat.dimension_value(w.shape[1]) // 4
    start, peephole = tf.zeros([tf.shape(x)[1], units], x.dtype), tf.zeros([units], x.dtype)
    wci, wcf, wco = (peephole if each is None else each for each in (wci, wcf, wco))
    return tf.raw_ops.BlockLSTM(
        seq_len_max=seq_len_max, x=x, cs_prev=start if cs_prev is None else cs_prev,
        h_prev=start if h_prev is None else h_prev, w=w, b=b, wci=wci, wcf=wcf, wco=wco, forget_bias=forget_bias,
        cell_clip=-1 if cell_clip is None else cell_clip, use_peephole=use_peephole, name=name,
    )  # fmt: skip


class GRUBlockCell(_OneStateCell):
    """A GRU cell with variables named `w_ru`, `b_ru` (gates r, u) and `w_c`, `b_c`."""

    def __init__(self, num_units=None, cell_size=None, reuse=None, name="gru_cell"):
        super().__init__(_reuse=reuse, name=name)
        if (num_units is None) == (cell_size is None):
            raise ValueError("GRUBlockCell: expected num_units or its old name cell_size, not both.")
        self._num_units = num_units or cell_size

    def build(self, input_shape):
        size, width = self._num_units, tf.compat.dimension_value(input_shape[-1])
        self._gate_kernel = self.add_variable(self._names[0], [width + size, size * 2])
        self._gate_bias = self.add_variable(self._names[1], [size * 2], initializer=tf.constant_initializer(1.0))
        self._candidate_kernel = self.add_variable(self._names[2], [width + size, size])
        self._candidate_bias = self.add_variable(self._names[3], [size], initializer=tf.zeros_initializer())
        self.built = True

    _names = ("w_ru", "b_ru", "w_c", "b_c")

    def call(self, inputs, h_prev):
        gates = tf.nn.bias_add(tf.matmul(tf.concat([inputs, h_prev], 1), self._gate_kernel), self._gate_bias)
        r, u = tf.split(tf.sigmoid(gates), 2, 1)
        candidate = tf.matmul(tf.concat([inputs, r * h_prev], 1), self._candidate_kernel)
        new = u * h_prev + (1 - u) * tf.tanh(tf.nn.bias_add(candidate, self._candidate_bias))
        return new, new


class GRUBlockCellV2(GRUBlockCell):
    """A GRU cell like `GRUBlockCell`, with the variable names of `GRUCell`."""

    _names = ("gates/kernel", "gates/bias", "candidate/kernel", "candidate/bias")
