"""Defines cells that wrap other cells: projections, embeddings, highways, attention over a window.

This module, with the affine map of `linear.py`, is also `tf.contrib.rnn.python.ops.core_rnn_cell`.
"""

from __future__ import annotations

import tensorflow.compat.v1 as tf

from tensorflow1_compat.contrib.rnn.linear import _Linear, _linear

RNNCell = tf.nn.rnn_cell.RNNCell


def _project(tensor, width, activation):
    """Applies a dense layer whose variables are `kernel` and `bias` in the current scope."""
    result = _linear(tensor, width, bias=True)
    return activation(result) if activation else result


def check_cell(function_name, cell):
    """Raises TypeError for an object that lacks the methods of an RNN cell."""
    is_stateful = hasattr(cell, "zero_state") or hasattr(cell, "get_initial_state")
    if not (hasattr(cell, "output_size") and hasattr(cell, "state_size") and is_stateful and callable(cell)):
        raise TypeError(f"{function_name}: cell must be an RNNCell; got {cell!r} of type {type(cell).__name__}.")


class _WrappingCell(RNNCell):
    """A base class of cells with the state size and output size of an inner cell."""

    def __init__(self, cell, reuse=None):
        super().__init__(_reuse=reuse)
        check_cell(type(self).__name__, cell)
        self._cell = cell

    @property
    def state_size(self):
        return self._cell.state_size

    @property
    def output_size(self):
        return self._cell.output_size

    def zero_state(self, batch_size, dtype):
        with tf.name_scope(type(self).__name__ + "ZeroState"):
            return self._cell.zero_state(batch_size, dtype)


class InputProjectionWrapper(_WrappingCell):
    """A cell that projects its input to `num_proj` values before an inner cell reads them."""

    def __init__(self, cell, num_proj, activation=None, input_size=None, reuse=None):
        super().__init__(cell, reuse)
        self._num_proj, self._activation = num_proj, activation

    def call(self, inputs, state):
        return self._cell(_project(inputs, self._num_proj, self._activation), state)


class OutputProjectionWrapper(_WrappingCell):
    """A cell that projects an inner cell's output to `output_size` values."""

    def __init__(self, cell, output_size, activation=None, reuse=None):
        super().__init__(cell, reuse)
        if output_size < 1:
            raise ValueError(f"OutputProjectionWrapper: output_size must be at least 1; got {output_size}.")
        self._output_size, self._activation = output_size, activation

    @property
    def output_size(self):
        return self._output_size

    def call(self, inputs, state):
        output, state = self._cell(inputs, state)
        return _project(output, self._output_size, self._activation), state


class EmbeddingWrapper(_WrappingCell):
    """A cell that looks up integer inputs [batch] or [batch, 1] in the variable `embedding` for an inner cell."""

    def __init__(self, cell, embedding_classes, embedding_size, initializer=None, reuse=None):
        super().__init__(cell, reuse)
        if embedding_classes < 1 or embedding_size < 1:
            raise ValueError("EmbeddingWrapper: embedding_classes and embedding_size must be at least 1; got "
                             f"{embedding_classes} and {embedding_size}.")  # fmt: skip
        self._classes, self._size, self._initializer = embedding_classes, embedding_size, initializer

    def call(self, inputs, state):
        scope = tf.get_variable_scope()
        initializer = self._initializer or scope.initializer or tf.random_uniform_initializer(-(3**0.5), 3**0.5)
        dtype = tf.nest.flatten(state)[0].dtype
        table = tf.get_variable("embedding", [self._classes, self._size], initializer=initializer, dtype=dtype)
        return self._cell(tf.nn.embedding_lookup(table, tf.reshape(inputs, [-1])), state)


class HighwayWrapper(_WrappingCell):
    """A cell that mixes an inner cell's output with the input by a learned gate.

    Srivastava and others: Highway Networks."""

    def __init__(self, cell, couple_carry_transform_gates=True, carry_bias_init=1.0):
        super().__init__(cell)
        self._couple, self._carry_bias = couple_carry_transform_gates, carry_bias_init

    def __call__(self, inputs, state, scope=None):
        output, state = self._cell(inputs, state, scope=scope)
        return self._highway(inputs, output), state

    def _highway(self, inputs, output):
        width = inputs.shape[-1]

        def gate(name, bias):
            weight = tf.get_variable(f"{name}_w", [width, width])
            offset = tf.get_variable(f"{name}_b", [width], initializer=tf.constant_initializer(bias))
            return tf.sigmoid(tf.nn.xw_plus_b(inputs, weight, offset))

        carry = gate("carry", self._carry_bias)
        transform = 1 - carry if self._couple else gate("transform", -self._carry_bias)
        return inputs * carry + output * transform


class CompiledWrapper(_WrappingCell):
    """A cell that calls an inner cell without compiling it, because XLA here compiles only whole graphs."""

    def __init__(self, cell, compile_stateful=False):
        super().__init__(cell)

    def __call__(self, inputs, state, scope=None):
        return self._cell(inputs, state, scope=scope)


class AttentionCellWrapper(_WrappingCell):
    """A cell that attends to the last `attn_length` states of an inner cell.

    The state is a tuple (inner cell's state, attention [batch, attn_size], window [batch, attn_size * attn_length]);
    without `state_is_tuple`, the concatenation of these.
    """

    def __init__(
        self, cell, attn_length, attn_size=None, attn_vec_size=None, input_size=None, state_is_tuple=True, reuse=None
    ):
        super().__init__(cell, reuse)
        if attn_length <= 0:
            raise ValueError(f"AttentionCellWrapper: attn_length must be at least 1; got {attn_length}.")
        if tf.nest.is_nested(cell.state_size) and not state_is_tuple:
            raise ValueError("AttentionCellWrapper: a cell with several states needs state_is_tuple=True.")
        self._is_tuple = state_is_tuple
        self._length, self._attn_size = attn_length, attn_size or cell.output_size
        self._vec_size, self._input_size = attn_vec_size or self._attn_size, input_size

    @property
    def state_size(self):
        sizes = (self._cell.state_size, self._attn_size, self._attn_size * self._length)
        return sizes if self._is_tuple else sum(sizes)

    @property
    def output_size(self):
        return self._attn_size

    def zero_state(self, batch_size, dtype):
        return RNNCell.zero_state(self, batch_size, dtype)

    def call(self, inputs, state):
        if not self._is_tuple:
            state = tf.split(state, [self._cell.state_size, self._attn_size, self._attn_size * self._length], 1)
        cell_state, attention, window = state
        window = tf.reshape(window, [-1, self._length, self._attn_size])
        width = self._input_size or tf.compat.dimension_value(inputs.shape[1])
        inputs = _linear(tf.concat([inputs, attention], 1), width, bias=True)
        output, cell_state = self._cell(inputs, cell_state)
        flat = tf.nest.flatten(cell_state)
        query = flat[0] if len(flat) == 1 else tf.concat(flat, 1)
        with tf.variable_scope("attention"):
            kernel = tf.get_variable("attn_w", [1, 1, self._attn_size, self._vec_size])
            vector = tf.get_variable("attn_v", [self._vec_size])
            hidden = tf.reshape(window, [-1, self._length, 1, self._attn_size])
            features = tf.nn.conv2d(hidden, kernel, [1, 1, 1, 1], "SAME")
            wanted = tf.reshape(_linear(query, self._vec_size, bias=True), [-1, 1, 1, self._vec_size])
            scores = tf.nn.softmax(tf.reduce_sum(vector * tf.tanh(features + wanted), [2, 3]))
            attention = tf.reduce_sum(tf.reshape(scores, [-1, self._length, 1, 1]) * hidden, [1, 2])
        with tf.variable_scope("attn_output_projection"):
            output = _linear(tf.concat([output, attention], 1), self._attn_size, bias=True)
        window = tf.concat([window[:, 1:], output[:, None]], 1)
        state = (cell_state, attention, tf.reshape(window, [-1, self._length * self._attn_size]))
        return output, state if self._is_tuple else tf.concat(state, 1)
