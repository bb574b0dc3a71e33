"""Defines RNN cells that `tf.nn.rnn_cell` lacks, with the variable names of TensorFlow 1.15."""

from __future__ import annotations

import tensorflow.compat.v1 as tf

RNNCell = tf.nn.rnn_cell.RNNCell
LSTMStateTuple = tf.nn.rnn_cell.LSTMStateTuple


class _OneStateCell(RNNCell):
    """A base class of cells whose state and output both have `_num_units` values."""

    @property
    def state_size(self):
        return self._num_units

    output_size = state_size


class _TwoStateCell(RNNCell):
    """A base class of cells with the two states of an LSTM and an optional projection to `_num_proj` values."""

    _num_proj = None

    @property
    def state_size(self):
        return LSTMStateTuple(self._num_units, self.output_size)

    @property
    def output_size(self):
        return self._num_proj or self._num_units


def _layer_norm(tensor, scope, gain, shift):
    """Applies layer normalisation over the last axis, with the variables `<scope>/gamma` and `<scope>/beta`."""
    width = tensor.shape[-1:]
    with tf.variable_scope(scope):
        gamma = tf.get_variable("gamma", width, tensor.dtype, initializer=tf.constant_initializer(gain))
        beta = tf.get_variable("beta", width, tensor.dtype, initializer=tf.constant_initializer(shift))
    mean, variance = tf.nn.moments(tensor, [-1], keep_dims=True)
    epsilon = 1e-3 if tensor.dtype == tf.float16 else 1e-12
    return tf.nn.batch_normalization(tensor, mean, variance, beta, gamma, epsilon)


class LayerNormBasicLSTMCell(_TwoStateCell):
    """An LSTM cell with layer normalisation (Ba and others) and dropout of the candidate (Semeniuta and others).

    The gates are in the order i, j, f, o.

    Args:
      num_units: width of the state.
      forget_bias: added to the forget gate.
      norm_gain, norm_shift: initial values of `gamma` and `beta` of the normalisations.
      layer_norm: whether to use layer normalisation, which replaces the bias.
      dropout_keep_prob: share of the candidate that is kept; 1.0 for no dropout.
      dropout_prob_seed: seed of the dropout.

    Graph: `kernel`, `bias` or `input/`, `transform/`, `forget/`, `output/`, `state/` + `gamma`, `beta`.
    """

    def __init__(
        self, num_units, forget_bias=1.0, input_size=None, activation=tf.tanh, layer_norm=True, norm_gain=1.0,
        norm_shift=0.0, dropout_keep_prob=1.0, dropout_prob_seed=None, reuse=None,
    ):  # fmt: skip
        super().__init__(_reuse=reuse)
        self._num_units, self._forget_bias, self._activation = num_units, forget_bias, activation
        self._has_norm, self._gain, self._shift = layer_norm, norm_gain, norm_shift
        self._keep_prob, self._seed = dropout_keep_prob, dropout_prob_seed

    def call(self, inputs, state):
        c, h = state
        both = tf.concat([inputs, h], 1)
        kernel = tf.get_variable("kernel", [both.shape[-1], 4 * self._num_units], both.dtype)
        gates = tf.matmul(both, kernel)
        if not self._has_norm:
            gates = tf.nn.bias_add(gates, tf.get_variable("bias", [4 * self._num_units], both.dtype))
        i, j, f, o = tf.split(gates, 4, axis=1)
        if self._has_norm:
            scopes = ((i, "input"), (j, "transform"), (f, "forget"), (o, "output"))
            i, j, f, o = (_layer_norm(gate, scope, self._gain, self._shift) for gate, scope in scopes)
        candidate = self._activation(j)
        if tf.is_tensor(self._keep_prob) or self._keep_prob < 1:
            candidate = tf.nn.dropout(candidate, keep_prob=self._keep_prob, seed=self._seed)
        c = c * tf.sigmoid(f + self._forget_bias) + tf.sigmoid(i) * candidate
        if self._has_norm:
            c = _layer_norm(c, "state", self._gain, self._shift)
        h = self._activation(c) * tf.sigmoid(o)
        return h, LSTMStateTuple(c, h)


class CoupledInputForgetGateLSTMCell(_TwoStateCell):
    """An LSTM cell whose input gate is 1 minus the forget gate; gates j, f, o in variables `W_<shard>` and `B`."""

    def __init__(
        self, num_units, use_peepholes=False, initializer=None, num_proj=None, proj_clip=None, num_unit_shards=1,
        num_proj_shards=1, forget_bias=1.0, state_is_tuple=True, activation=tf.tanh, reuse=None, layer_norm=False,
        norm_gain=1.0, norm_shift=0.0,
    ):  # fmt: skip
        super().__init__(_reuse=reuse)
        self._is_tuple, self._shards, self._projection_shards = state_is_tuple, num_unit_shards, num_proj_shards
        self._num_units, self._use_peepholes, self._initializer = num_units, use_peepholes, initializer
        self._num_proj, self._proj_clip, self._forget_bias = num_proj, proj_clip, forget_bias
        self._activation, self._has_norm, self._gain, self._shift = activation, layer_norm, norm_gain, norm_shift

    @property
    def state_size(self):
        sizes = super().state_size
        return sizes if self._is_tuple else sum(sizes)

    def call(self, inputs, state):
        c, h = state if self._is_tuple else tf.split(state, [self._num_units, self.output_size], 1)
        with tf.variable_scope(tf.get_variable_scope(), initializer=self._initializer):
            return self._step(inputs, c, h)

    def _step(self, inputs, c, h):
        units, both = self._num_units, tf.concat([inputs, h], 1)
        gates = tf.matmul(both, _make_sharded_matrix("W", [both.shape[-1], 3 * units], both.dtype, self._shards))
        bias = tf.get_variable("B", [3 * units], both.dtype, initializer=tf.zeros_initializer())
        if not self._has_norm:
            gates = tf.nn.bias_add(gates, bias)
        j, f, o = tf.split(gates, 3, axis=1)
        if self._has_norm:
            scopes = ((j, "transform"), (f, "forget"), (o, "output"))
            j, f, o = (_layer_norm(gate, scope, self._gain, self._shift) for gate, scope in scopes)
        if self._use_peepholes:
            f += tf.get_variable("W_F_diag", [units], both.dtype) * c
        forget = tf.sigmoid(f + self._forget_bias)
        c = forget * c + (1 - forget) * self._activation(j)
        if self._has_norm:
            c = _layer_norm(c, "state", self._gain, self._shift)
        if self._use_peepholes:
            o += tf.get_variable("W_O_diag", [units], both.dtype) * c
        h = tf.sigmoid(o) * self._activation(c)
        if self._num_proj is not None:
            h = tf.matmul(h, _make_sharded_matrix("W_P", [units, self._num_proj], both.dtype, self._projection_shards))
            if self._proj_clip is not None:
                h = tf.clip_by_value(h, -self._proj_clip, self._proj_clip)
        return h, LSTMStateTuple(c, h) if self._is_tuple else tf.concat([c, h], 1)


def _make_sharded_matrix(name, shape, dtype, shards):
    """Returns a matrix whose rows are split over variables of similar sizes, `<name>_0` and so on."""
    rows = tf.compat.dimension_value(shape[0])
    sizes = [rows // shards + (place < rows % shards) for place in range(shards)]
    parts = [tf.get_variable(f"{name}_{place}", [size, *shape[1:]], dtype) for place, size in enumerate(sizes)]
    return parts[0] if shards == 1 else tf.concat(parts, 0)


class NASCell(_TwoStateCell):
    """The RNN cell found by Zoph and Le (Neural Architecture Search with Reinforcement Learning).

    Graph: `kernel` [input, 8 * units], `recurrent_kernel` [output, 8 * units], `bias`, `projection_weights`.
    """

    def __init__(self, num_units, num_proj=None, use_bias=False, reuse=None, **kwargs):
        super().__init__(_reuse=reuse, **kwargs)
        self._num_units, self._num_proj, self._use_bias = num_units, num_proj, use_bias

    def build(self, inputs_shape):
        units, width = self._num_units, tf.compat.dimension_value(inputs_shape[-1])
        self.recurrent_kernel = self.add_variable("recurrent_kernel", [self.output_size, 8 * units])
        self.kernel = self.add_variable("kernel", [width, 8 * units])
        if self._use_bias:
            self.bias = self.add_variable("bias", [8 * units], initializer=tf.zeros_initializer())
        if self._num_proj is not None:
            self.projection_weights = self.add_variable("projection_weights", [units, self._num_proj])
        self.built = True

    def call(self, inputs, state):
        c, m = state
        m_matrix = tf.matmul(m, self.recurrent_kernel)
        if self._use_bias:
            m_matrix = tf.nn.bias_add(m_matrix, self.bias)
        a, b = tf.split(m_matrix, 8, axis=1), tf.split(tf.matmul(inputs, self.kernel), 8, axis=1)
        first = [
            tf.sigmoid(a[0] + b[0]), tf.nn.relu(a[1] + b[1]), tf.sigmoid(a[2] + b[2]), tf.nn.relu(a[3] * b[3]),
            tf.tanh(a[4] + b[4]), tf.sigmoid(a[5] + b[5]), tf.tanh(a[6] + b[6]), tf.sigmoid(a[7] + b[7]),
        ]  # fmt: skip
        second = [
            tf.tanh(first[0] * first[1]), tf.tanh(first[2] + first[3]), tf.tanh(first[4] * first[5]),
            tf.sigmoid(first[6] + first[7]),
        ]  # fmt: skip
        c = tf.tanh(second[0] + c) * second[1]
        m = tf.tanh(c * tf.tanh(second[2] + second[3]))
        if self._num_proj is not None:
            m = tf.matmul(m, self.projection_weights)
        return m, LSTMStateTuple(c, m)


class UGRNNCell(_OneStateCell):
    """An RNN cell with one gate for update and reset (Collins and others), with variables `kernel` and `bias`."""

    def __init__(self, num_units, initializer=None, forget_bias=1.0, activation=tf.tanh, reuse=None):
        super().__init__(_reuse=reuse)
        self._num_units, self._initializer = num_units, initializer
        self._forget_bias, self._activation = forget_bias, activation

    def call(self, inputs, state):
        both = tf.concat([inputs, state], 1)
        with tf.variable_scope(tf.get_variable_scope(), initializer=self._initializer):
            kernel = tf.get_variable("kernel", [both.shape[-1], 2 * self._num_units], both.dtype)
            bias = tf.get_variable("bias", [2 * self._num_units], both.dtype, initializer=tf.zeros_initializer())
        gate, candidate = tf.split(tf.nn.xw_plus_b(both, kernel, bias), 2, axis=1)
        gate = tf.sigmoid(gate + self._forget_bias)
        new = gate * state + (1 - gate) * self._activation(candidate)
        return new, new


class SRUCell(_OneStateCell):
    """A simple recurrent unit (Lei and Zhang), with variables `kernel` [input, 4 * units] and `bias` [2 * units]."""

    def __init__(self, num_units, activation=None, reuse=None, name=None, **kwargs):
        super().__init__(_reuse=reuse, name=name, **kwargs)
        self._num_units, self._activation = num_units, activation or tf.tanh

    def build(self, inputs_shape):
        width = tf.compat.dimension_value(inputs_shape[1])
        self._kernel = self.add_variable("kernel", [width, 4 * self._num_units])
        self._bias = self.add_variable("bias", [2 * self._num_units], initializer=tf.zeros_initializer())
        self.built = True

    def call(self, inputs, state):
        candidate, f, r, shortcut = tf.split(tf.matmul(inputs, self._kernel), 4, axis=1)
        forget, reset = tf.split(tf.sigmoid(tf.nn.bias_add(tf.concat([f, r], 1), self._bias)), 2, axis=1)
        c = forget * state + (1 - forget) * candidate
        return reset * self._activation(c) + (1 - reset) * shortcut, c


class IndRNNCell(_OneStateCell):
    """An independently recurrent cell (Li and others): each unit reads only its own last output.

    The variables are `kernel_w`, `kernel_u` and `bias`.
    """

    def __init__(self, num_units, activation=None, reuse=None, name=None, dtype=None):
        super().__init__(_reuse=reuse, name=name, dtype=dtype)
        self._num_units, self._activation = num_units, activation or tf.tanh

    def build(self, inputs_shape):
        width = tf.compat.dimension_value(inputs_shape[1])
        self._kernel_w = self.add_variable("kernel_w", [width, self._num_units])
        bounds = tf.random_uniform_initializer(-1.0, 1.0)
        self._kernel_u = self.add_variable("kernel_u", [1, self._num_units], initializer=bounds)
        self._bias = self.add_variable("bias", [self._num_units], initializer=tf.zeros_initializer())
        self.built = True

    def call(self, inputs, state):
        new = self._activation(tf.matmul(inputs, self._kernel_w) + state * self._kernel_u + self._bias)
        return new, new


class ConvLSTMCell(RNNCell):
    """A convolutional LSTM cell (Shi and others).

    `kernel` and `biases` hold the gates in the order input, candidate, forget, output.

    Args:
      conv_ndims: number of dimensions of the convolution: 1, 2 or 3.
      input_shape: shape of one input without the batch: [..., channels].
      output_channels: number of channels of the state and the output.
      kernel_shape: sizes of the convolution window; the convolution preserves the shape.
      skip_connection: whether to append the input's channels to the output.
      initializers: initializer of `kernel`, or a dict of initializers by variable name.
    """

    def __init__(
        self, conv_ndims, input_shape, output_channels, kernel_shape, use_bias=True, skip_connection=False,
        forget_bias=1.0, initializers=None, name="conv_lstm_cell",
    ):  # fmt: skip
        super().__init__(name=name)
        if conv_ndims != len(input_shape) - 1:
            raise ValueError(f"ConvLSTMCell: conv_ndims={conv_ndims} does not fit input_shape={input_shape}.")
        self._input_shape, self._channels, self._kernel_shape = list(input_shape), output_channels, list(kernel_shape)
        self._use_bias, self._skip, self._forget_bias = use_bias, skip_connection, forget_bias
        self._initializers = initializers if isinstance(initializers, dict) else {"kernel": initializers}

    @property
    def state_size(self):
        return LSTMStateTuple(*[tf.TensorShape([*self._input_shape[:-1], self._channels])] * 2)

    @property
    def output_size(self):
        extra = self._input_shape[-1] if self._skip else 0
        return tf.TensorShape([*self._input_shape[:-1], self._channels + extra])

    def call(self, inputs, state, scope=None):
        c, h = state
        both = tf.concat([inputs, h], -1)
        shape = [*self._kernel_shape, both.shape[-1], 4 * self._channels]
        kernel = tf.get_variable("kernel", shape, both.dtype, initializer=self._initializers.get("kernel"))
        gates = tf.nn.convolution(both, kernel, "SAME")
        if self._use_bias:
            zeros = self._initializers.get("biases") or tf.zeros_initializer()
            gates += tf.get_variable("biases", [4 * self._channels], both.dtype, initializer=zeros)
        i, j, f, o = tf.split(gates, 4, axis=-1)
        c = tf.sigmoid(f + self._forget_bias) * c + tf.sigmoid(i) * tf.tanh(j)
        output = tf.tanh(c) * tf.sigmoid(o)
        return tf.concat([output, inputs], -1) if self._skip else output, LSTMStateTuple(c, output)


class Conv1DLSTMCell(ConvLSTMCell):
    """A `ConvLSTMCell` with one-dimensional convolutions."""

    def __init__(self, name="conv_1d_lstm_cell", **kwargs):
        super().__init__(conv_ndims=1, name=name, **kwargs)


class Conv2DLSTMCell(ConvLSTMCell):
    """A `ConvLSTMCell` with two-dimensional convolutions."""

    def __init__(self, name="conv_2d_lstm_cell", **kwargs):
        super().__init__(conv_ndims=2, name=name, **kwargs)


class Conv3DLSTMCell(ConvLSTMCell):
    """A `ConvLSTMCell` with three-dimensional convolutions."""

    def __init__(self, name="conv_3d_lstm_cell", **kwargs):
        super().__init__(conv_ndims=3, name=name, **kwargs)
