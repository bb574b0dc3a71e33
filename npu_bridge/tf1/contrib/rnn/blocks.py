"""Cells of one kernel a step or a sequence; TensorFlow still has their kernels."""

from __future__ import annotations

import tensorflow.compat.v1 as tf

from npu_bridge.tf1.contrib.rnn.cells import _OneState, _TwoStates
from npu_bridge.tf1.contrib.rnn.loops import FusedRNNCell

LSTMStateTuple = tf.nn.rnn_cell.LSTMStateTuple


class _LSTMBlock:
    """The variables of an LSTM in one operator: `kernel`, `bias` and perhaps peepholes."""

    def _set(self, num_units, forget_bias, cell_clip, use_peephole):
        self._num_units, self._forget_bias, self._use_peephole = num_units, forget_bias, use_peephole
        self._cell_clip = -1 if cell_clip is None else cell_clip

    def build(self, inputs_shape):
        width = tf.compat.dimension_value(inputs_shape[-1])
        self._kernel = self.add_variable("kernel", [width + self._num_units, 4 * self._num_units])
        self._bias = self.add_variable("bias", [4 * self._num_units], initializer=tf.zeros_initializer())
        self._peepholes = [
            self.add_variable(name, [self._num_units]) for name in ("w_i_diag", "w_f_diag", "w_o_diag")
            if self._use_peephole
        ]  # fmt: skip
        self.built = True

    def _arguments(self, dtype):
        """What the operators of a step and of a sequence both take."""
        w_ci, w_cf, w_co = self._peepholes or [tf.zeros([self._num_units], dtype)] * 3
        return {
            "w": self._kernel, "wci": w_ci, "wcf": w_cf, "wco": w_co, "b": self._bias,
            "forget_bias": self._forget_bias, "cell_clip": self._cell_clip, "use_peephole": self._use_peephole,
        }  # fmt: skip


class LSTMBlockCell(_LSTMBlock, _TwoStates):
    """`BasicLSTMCell` in one operator: variables `kernel` [input + units, 4 * units] and `bias`, gates i, c, f, o.

    Args:
      num_units: width of the state.
      forget_bias: added to the forget gate.
      cell_clip: bound of the cell state; None for no bound.
      use_peephole: gates see the cell state (`w_i_diag`, `w_f_diag`, `w_o_diag`).
    """

    def __init__(
        self, num_units, forget_bias=1.0, cell_clip=None, use_peephole=False, dtype=None, reuse=None, name="lstm_cell"
    ):
        super().__init__(_reuse=reuse, dtype=dtype, name=name)
        self._set(num_units, forget_bias, cell_clip, use_peephole)

    def call(self, inputs, state):
        """(output, new state)."""
        c, h = state
        arguments = self._arguments(inputs.dtype)
        _, c, _, _, _, _, h = tf.raw_ops.LSTMBlockCell(x=inputs, cs_prev=c, h_prev=h, **arguments)
        return h, LSTMStateTuple(c, h)


class LSTMBlockWrapper(tf.layers.Layer, FusedRNNCell):
    """A fused cell over LSTM states; `_call_cell(inputs, c, h, dtype, sequence_length)` gives all steps."""

    @property
    def num_units(self):
        raise NotImplementedError

    def call(self, inputs, initial_state=None, dtype=None, sequence_length=None):
        """(outputs [time, batch, units], final (c, h)); inputs [time, batch, width] or a list over time."""
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


class LSTMBlockFusedCell(_LSTMBlock, LSTMBlockWrapper):
    """`LSTMBlockCell` over all time steps in one operator."""

    def __init__(
        self, num_units, forget_bias=1.0, cell_clip=None, use_peephole=False, reuse=None, dtype=None,
        name="lstm_fused_cell",
    ):  # fmt: skip
        super().__init__(_reuse=reuse, name=name, dtype=dtype)
        self._set(num_units, forget_bias, cell_clip, use_peephole)

    @property
    def num_units(self):
        return self._num_units

    def _call_cell(self, inputs, c_start, h_start, dtype, lengths):
        time = tf.shape(inputs)[0]
        arguments = self._arguments(dtype)
        longest = tf.cast(time if lengths is None else tf.reduce_max(lengths), tf.int64)
        _, cells, _, _, _, _, outputs = tf.raw_ops.BlockLSTM(
            seq_len_max=longest, x=inputs, cs_prev=c_start, h_prev=h_start, **arguments
        )
        return cells, outputs


class GRUBlockCell(_OneState):
    """`GRUCell` in one operator: variables `w_ru`, `b_ru` (gates r, u) and `w_c`, `b_c`."""

    def __init__(self, num_units=None, cell_size=None, reuse=None, name="gru_cell"):
        super().__init__(_reuse=reuse, name=name)
        if (num_units is None) == (cell_size is None):
            raise ValueError("GRUBlockCell: expected num_units (or its old name cell_size), and not both.")
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
        """(output, new state)."""
        _, _, _, new = tf.raw_ops.GRUBlockCell(
            x=inputs, h_prev=h_prev, w_ru=self._gate_kernel, w_c=self._candidate_kernel, b_ru=self._gate_bias,
            b_c=self._candidate_bias,
        )  # fmt: skip
        return new, new


class GRUBlockCellV2(GRUBlockCell):
    """`GRUBlockCell` with the variable names of `GRUCell`."""

    _names = ("gates/kernel", "gates/bias", "candidate/kernel", "candidate/bias")
