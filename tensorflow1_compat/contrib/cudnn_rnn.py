"""`tf.contrib.cudnn_rnn`: recurrent layers over whole sequences, built of cells that run on any device.

Variables have the same names and shapes as in checkpoints of 1.15 (`.../cudnn_compatible_lstm_cell/kernel`).
"""

from __future__ import annotations

import tensorflow.compat.v1 as tf

from tensorflow1_compat.contrib.rnn.blocks import LSTMBlockCell
from tensorflow1_compat.contrib.rnn.loops import reversed_in_time

CUDNN_RNN_UNIDIRECTION = "unidirectional"
CUDNN_RNN_BIDIRECTION = "bidirectional"
CUDNN_LSTM, CUDNN_GRU, CUDNN_RNN_RELU, CUDNN_RNN_TANH = "lstm", "gru", "rnn_relu", "rnn_tanh"
CUDNN_INPUT_LINEAR_MODE, CUDNN_INPUT_SKIP_MODE, CUDNN_INPUT_AUTO_MODE = "linear_input", "skip_input", "auto_select"


class CudnnCompatibleLSTMCell(LSTMBlockCell):
    """The LSTM cell of `CudnnLSTM`, whose forget gate has only the learnt bias."""

    def __init__(self, num_units, reuse=None):
        super().__init__(
            num_units, forget_bias=0, cell_clip=None, use_peephole=False, reuse=reuse, name="cudnn_compatible_lstm_cell"
        )


class CudnnCompatibleGRUCell(tf.nn.rnn_cell.GRUCell):
    """The GRU cell of `CudnnGRU`: the reset gate multiplies `state @ hidden_kernel + hidden_bias`."""

    def __init__(self, num_units, reuse=None, kernel_initializer=None):
        super().__init__(
            num_units, activation=None, reuse=reuse, kernel_initializer=kernel_initializer,
            name="cudnn_compatible_gru_cell",
        )  # fmt: skip

    def build(self, inputs_shape):
        width, units = tf.compat.dimension_value(inputs_shape[-1]), self._num_units
        self._gate_kernel = self.add_variable(
            "gates/kernel", [width + units, 2 * units], initializer=self._kernel_initializer
        )
        self._gate_bias = self.add_variable(
            "gates/bias", [2 * units], initializer=self._bias_initializer or tf.constant_initializer(1.0, self.dtype)
        )
        scope, zeros = "candidate", self._bias_initializer or tf.zeros_initializer(self.dtype)
        self._input_kernel = self.add_variable(
            f"{scope}/input_projection/kernel", [width, units], initializer=self._kernel_initializer
        )
        self._hidden_kernel = self.add_variable(
            f"{scope}/hidden_projection/kernel", [units, units], initializer=self._kernel_initializer
        )
        self._input_bias = self.add_variable(f"{scope}/input_projection/bias", [units], initializer=zeros)
        self._hidden_bias = self.add_variable(f"{scope}/hidden_projection/bias", [units], initializer=zeros)
        self.built = True

    def call(self, inputs, state):
        gates = tf.nn.xw_plus_b(tf.concat([inputs, state], 1), self._gate_kernel, self._gate_bias)
        reset, update = tf.split(tf.sigmoid(gates), 2, axis=1)
        hidden = tf.nn.xw_plus_b(state, self._hidden_kernel, self._hidden_bias)
        candidate = self._activation(tf.nn.xw_plus_b(inputs, self._input_kernel, self._input_bias) + reset * hidden)
        new = (1 - update) * candidate + update * state
        return new, new


class _CudnnRNN:
    """Stacked recurrent layers of one kind over inputs [time, batch, width]; see `CudnnLSTM`."""

    def __init__(
        self, num_layers, num_units, input_mode=CUDNN_INPUT_LINEAR_MODE, direction=CUDNN_RNN_UNIDIRECTION, dropout=0.0,
        seed=None, dtype=tf.float32, kernel_initializer=None, bias_initializer=None, name=None, num_proj=None,
    ):  # fmt: skip
        if direction not in (CUDNN_RNN_UNIDIRECTION, CUDNN_RNN_BIDIRECTION):
            raise ValueError(f"{type(self).__name__}: direction={direction!r} is not unidirectional or bidirectional.")
        if num_proj is not None or input_mode not in (CUDNN_INPUT_LINEAR_MODE, CUDNN_INPUT_AUTO_MODE):
            raise ValueError(f"{type(self).__name__}: num_proj and skip_input are not available here; leave them out.")
        self.num_layers, self.num_units, self.direction = num_layers, num_units, direction
        self.input_mode, self._dropout, self._seed, self._dtype = input_mode, dropout, seed, tf.as_dtype(dtype)
        self._kernel_initializer = kernel_initializer or tf.glorot_uniform_initializer(seed)
        self._bias_initializer = bias_initializer or tf.zeros_initializer()
        self._name, self._scope, self._is_built, self.input_shape = name or self._default_name, None, False, None

    @property
    def num_dirs(self):
        """The number of directions: 1, or 2 for a bidirectional layer."""
        return 1 + (self.direction == CUDNN_RNN_BIDIRECTION)

    @property
    def trainable_variables(self):
        """The layer's variables."""
        prefix = self._scope.name + "/"
        return [var for var in tf.trainable_variables() if var.name.startswith(prefix)]

    trainable_weights = weights = variables = trainable_variables

    @property
    def name(self):
        """The layer's name."""
        return self._name

    def state_shape(self, batch_size):
        """Returns the shape of each state: [layers * directions, batch, units]."""
        return [[self.num_layers * self.num_dirs, batch_size, self.num_units]] * self._states

    def build(self, input_shape):
        """Stores the input shape [time, batch, width]; the first call of the layer makes the variables."""
        self.input_shape = tf.TensorShape(input_shape)

    def __call__(self, inputs, initial_state=None, sequence_lengths=None, time_major=True, training=True):
        """Returns outputs [time, batch, directions * units], and a tuple of final states shaped as in `state_shape`.

        Args:
          inputs: [time, batch, width], or [batch, time, width] with `time_major=False`.
          initial_state: tuple of states with shapes as in `state_shape`; default: zeros.
          sequence_lengths: int32 [batch]; outputs after the end of a sequence are zeros.
          training: whether to apply dropout between layers.
        """
        layer = inputs if time_major else tf.transpose(inputs, [1, 0, 2])
        batch, finals = tf.shape(layer)[1], []
        with tf.variable_scope(
            self._scope, self._name, reuse=self._is_built or None, custom_getter=self._get_variable
        ) as self._scope:
            outer = "stack_bidirectional_rnn" if self.num_dirs == 2 else "rnn"
            for depth in range(self.num_layers):
                if depth and training and self._dropout:
                    layer = tf.nn.dropout(layer, rate=self._dropout, seed=self._seed)
                outputs = []
                for way in range(self.num_dirs):
                    place = depth * self.num_dirs + way
                    start = self._choose_start_state(initial_state, place, batch, layer.dtype)
                    path = f"{outer}/cell_{depth}/bidirectional_rnn/{('fw', 'bw')[way]}" if self.num_dirs == 2 else (
                        f"{outer}/multi_rnn_cell/cell_{depth}"
                    )  # fmt: skip
                    output, final = self._run_direction(layer, start, sequence_lengths, path, way == 1)
                    outputs.append(output)
                    finals.append(tf.nest.flatten(final))
                layer = outputs[0] if len(outputs) == 1 else tf.concat(outputs, 2)
            self._is_built = True
        states = tuple(tf.stack(list(each)) for each in zip(*[self._to_public_state(final) for final in finals]))
        return (layer if time_major else tf.transpose(layer, [1, 0, 2])), states

    call = __call__

    def _get_variable(self, getter, name, *arguments, **options):
        """Gets a variable whose initial value is drawn as in cuDNN: for each gate, and for inputs and state, apart."""
        units, is_alone = self.num_units, name.split("/")[-2].endswith("_projection")  # reads inputs or state

        def draw(shape, dtype=None, partition_info=None):
            def draw_gates(initializer, *widths):
                gates = range(shape[-1] // units)
                return tf.concat([tf.transpose(initializer([units, *widths], dtype=dtype)) for _ in gates], -1)

            if len(shape) == 1:  # cuDNN adds up a bias for inputs and a bias for the state
                return tf.add_n([draw_gates(self._bias_initializer) for _ in range(1 if is_alone else 2)])
            widths = [shape[0]] if is_alone else [shape[0] - units, units]
            return tf.concat([draw_gates(self._kernel_initializer, width) for width in widths], 0)

        return getter(name, *arguments, **{**options, "initializer": draw})

    def _run_direction(self, inputs, start, lengths, path, is_backward):
        def reversed_if_backward(tensor):
            return reversed_in_time(tensor, lengths) if is_backward else tensor

        with tf.variable_scope(path):
            cell = self._cell(self.num_units)
            scope = tf.get_variable_scope()
            output, final = tf.nn.dynamic_rnn(
                cell, reversed_if_backward(inputs), lengths, initial_state=start, time_major=True, scope=scope
            )
        return reversed_if_backward(output), final

    def _choose_start_state(self, initial_state, place, batch, dtype):
        if initial_state is None:
            return self._cell(self.num_units).zero_state(batch, dtype)
        return self._to_cell_state([state[place] for state in initial_state])


class CudnnLSTM(_CudnnRNN):
    """Stacked LSTM layers over whole sequences.

    Args:
      num_layers, num_units: number of layers and width of each layer.
      direction: "unidirectional" or "bidirectional".
      dropout: share of the values between layers that is dropped in training.
      seed: seed of dropout and of the default initializer.
      kernel_initializer: initializer of the matrices [units, width] of each gate; default: Glorot's, uniform.
      bias_initializer: initializer of the biases [units] of each gate; default: zeros.

    Final states are (h, c).
    """

    _default_name, _states, _cell = "cudnn_lstm", 2, CudnnCompatibleLSTMCell

    def _to_public_state(self, flat_states):
        return flat_states[1], flat_states[0]

    def _to_cell_state(self, public_state):
        return tf.nn.rnn_cell.LSTMStateTuple(public_state[1], public_state[0])


class CudnnGRU(_CudnnRNN):
    """Stacked GRU layers over whole sequences; see `CudnnLSTM`. The final state is (h,)."""

    _default_name, _states, _cell = "cudnn_gru", 1, CudnnCompatibleGRUCell

    def _to_public_state(self, flat_states):
        return (flat_states[0],)

    def _to_cell_state(self, public_state):
        return public_state[0]


class CudnnRNNTanh(CudnnGRU):
    """Stacked plain recurrent layers with tanh; see `CudnnLSTM`. The final state is (h,)."""

    _default_name, _cell = "cudnn_rnn_tanh", tf.nn.rnn_cell.BasicRNNCell


class CudnnRNNRelu(CudnnGRU):
    """Stacked plain recurrent layers with relu; see `CudnnLSTM`. The final state is (h,)."""

    _default_name = "cudnn_rnn_relu"

    @staticmethod
    def _cell(num_units):
        return tf.nn.rnn_cell.BasicRNNCell(num_units, activation=tf.nn.relu)
