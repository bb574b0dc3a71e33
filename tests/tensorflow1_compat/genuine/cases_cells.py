"""`tf.contrib.rnn`, `cudnn_rnn`, `recurrent` and `tf.nn.rnn_cell`: cells, wrappers and loops."""

from __future__ import annotations

# fmt: off
# A table: a line for each case, if it fits.
import signal

import tensorflow as tf
from common import case, ids, unknown, wrong, x

rnn, plain = tf.contrib.rnn, tf.nn.rnn_cell


def once(cell, inputs=None, state=None):
    """A step from a state that is not zero, and the sizes."""
    inputs = x(2, 3) if inputs is None else inputs
    with tf.variable_scope("root"):
        start = cell.zero_state(2, tf.float32) if state is None else state
        start = tf.contrib.framework.nest.map_structure(lambda each: each + 0.5, start)
        return cell(inputs, start), cell.state_size, cell.output_size


def loop(cell, lengths=(5, 3), inputs=None, **options):
    """A whole sequence with `dynamic_rnn`."""
    inputs = x(2, 5, 3) if inputs is None else inputs
    return tf.nn.dynamic_rnn(cell, inputs, list(lengths) if lengths else None, dtype=tf.float32, **options)


# Cells, by what they are called with.
for _name, _options in (
    ("BasicRNNCell", {}), ("BasicRNNCell", {"activation": tf.nn.relu}), ("BasicLSTMCell", {}),
    ("BasicLSTMCell", {"forget_bias": 0.3, "activation": tf.nn.softsign}), ("BasicLSTMCell", {"state_is_tuple": False}),
    ("GRUCell", {}), ("GRUCell", {"activation": "relu"}), ("LSTMCell", {}),
    ("LSTMCell", {"use_peepholes": True, "num_proj": 2, "cell_clip": 0.4, "proj_clip": 0.3}),
    ("LSTMCell", {"state_is_tuple": False, "num_proj": 2}), ("LSTMCell", {"num_unit_shards": 2, "num_proj_shards": 2,
                                                                         "num_proj": 2}),
    ("LayerNormBasicLSTMCell", {"norm_gain": 1.5, "norm_shift": 0.1}), ("LayerNormBasicLSTMCell",
        {"layer_norm": False}),
    ("CoupledInputForgetGateLSTMCell", {}),
    ("CoupledInputForgetGateLSTMCell", {"use_peepholes": True, "num_proj": 2, "proj_clip": 0.3, "layer_norm": True}),
    ("CoupledInputForgetGateLSTMCell", {"state_is_tuple": False, "num_proj": 2}),
    ("CoupledInputForgetGateLSTMCell", {"num_unit_shards": 2, "num_proj_shards": 2, "num_proj": 2}),
    ("NASCell", {}), ("NASCell", {"num_proj": 2, "use_bias": True}), ("UGRNNCell", {}), ("UGRNNCell", {
        "forget_bias": 0.2, "activation": tf.nn.relu}), ("SRUCell", {}), ("IndRNNCell", {}), ("IndRNNCell", {
            "activation": tf.nn.relu}), ("LSTMBlockCell", {}), ("LSTMBlockCell", {
                "use_peephole": True, "cell_clip": 0.3, "forget_bias": 0.4}), ("GRUBlockCell", {}),
    ("GRUBlockCellV2", {}),
):
    case("rnn." + _name, lambda n=_name, o=_options: once(getattr(rnn, n)(4, **o)))
case("nn.rnn_cell.LSTMCell", lambda: once(plain.LSTMCell(4, name="own", dtype=tf.float32)))
for _name in ("BasicRNNCell", "BasicLSTMCell", "GRUCell", "LSTMCell"):
    case(f"rnn.{_name} nn.rnn_cell.{_name}: the same", lambda n=_name: getattr(rnn, n) is getattr(plain, n))
case("rnn.LayerNormBasicLSTMCell: dropout",
     lambda: once(rnn.LayerNormBasicLSTMCell(4, dropout_keep_prob=0.5, dropout_prob_seed=3)), values=False)
case("rnn.LSTMStateTuple", lambda: rnn.LSTMStateTuple(x(2, 3), x(2, 3, seed=1)))
case("rnn.LSTMStateTuple: dtype", lambda: rnn.LSTMStateTuple(x(2, 3), x(2, 3, seed=1)).dtype)
case("rnn.LayerRNNCell rnn.RNNCell", lambda: [issubclass(plain.GRUCell, each) for each in (rnn.LayerRNNCell,
    rnn.RNNCell)])


class Own(rnn.RNNCell):
    """A cell of a user."""

    output_size = state_size = 4

    def call(self, inputs, state):
        new = tf.tanh(tf.layers.dense(inputs, 4, use_bias=False) + tf.get_variable("u", [4]) * state)
        return new, new


class OwnLayer(rnn.LayerRNNCell):
    """A cell of a user that builds its variables."""

    output_size = state_size = 4

    def build(self, shape):
        self.w = self.add_variable("w", [shape[1].value, 4])
        self.built = True

    def call(self, inputs, state):
        new = tf.tanh(tf.matmul(inputs, self.w) + state)
        return new, new


case("rnn.RNNCell", lambda: once(Own()))
case("rnn.RNNCell: loop", lambda: loop(Own()))
case("rnn.LayerRNNCell", lambda: loop(OwnLayer()))

# Convolutions.
case("rnn.ConvLSTMCell", lambda: once(rnn.ConvLSTMCell(1, [5, 3], 4, [3]), x(2, 5, 3)))
case("rnn.Conv1DLSTMCell", lambda: loop(rnn.Conv1DLSTMCell(
    input_shape=[4, 2], output_channels=3, kernel_shape=[3]), None, x(2, 5, 4, 2)))
case("rnn.Conv2DLSTMCell", lambda: once(rnn.Conv2DLSTMCell(
    input_shape=[3, 3, 2], output_channels=2, kernel_shape=[3, 3], use_bias=False), x(2, 3, 3, 2)))
case("rnn.Conv3DLSTMCell", lambda: once(rnn.Conv3DLSTMCell(
    input_shape=[2, 2, 2, 1], output_channels=2, kernel_shape=[2, 2, 2]), x(2, 2, 2, 2, 1)))
wrong("rnn.ConvLSTMCell", lambda: rnn.ConvLSTMCell(2, [5, 3], 4, [3]))

# Wrappers.
for _name, _make in (
    ("InputProjectionWrapper", lambda: rnn.InputProjectionWrapper(rnn.GRUCell(4), 3)),
    ("OutputProjectionWrapper", lambda: rnn.OutputProjectionWrapper(rnn.GRUCell(4), 3, activation=tf.tanh)),
    ("HighwayWrapper", lambda: rnn.HighwayWrapper(rnn.GRUCell(3))),
    ("HighwayWrapper", lambda: rnn.HighwayWrapper(rnn.GRUCell(3), couple_carry_transform_gates=False)),
    ("AttentionCellWrapper", lambda: rnn.AttentionCellWrapper(rnn.GRUCell(4), 3, state_is_tuple=True)),
    ("AttentionCellWrapper", lambda: rnn.AttentionCellWrapper(rnn.BasicLSTMCell(4), 3, attn_size=5, attn_vec_size=2,
                                                              input_size=6)),
    ("AttentionCellWrapper", lambda: rnn.AttentionCellWrapper(rnn.BasicLSTMCell(4, state_is_tuple=False), 2,
                                                              state_is_tuple=False)),
    ("ResidualWrapper", lambda: rnn.ResidualWrapper(rnn.GRUCell(3))),
    ("ResidualWrapper", lambda: rnn.ResidualWrapper(rnn.GRUCell(3), residual_fn=lambda i, o: i * 2 + o)),
    ("DeviceWrapper", lambda: rnn.DeviceWrapper(rnn.GRUCell(3), "/cpu:0")),
    ("DropoutWrapper", lambda: rnn.DropoutWrapper(rnn.GRUCell(3))),
    ("MultiRNNCell", lambda: rnn.MultiRNNCell([rnn.GRUCell(3), rnn.BasicLSTMCell(2)])),
    ("MultiRNNCell", lambda: rnn.MultiRNNCell([rnn.GRUCell(3), rnn.GRUCell(2)], state_is_tuple=False)),
):
    case("rnn." + _name, lambda m=_make: once(m()))
case("rnn.CompiledWrapper", lambda: once(rnn.CompiledWrapper(rnn.GRUCell(3))))
case("rnn.EmbeddingWrapper", lambda: once(rnn.EmbeddingWrapper(rnn.GRUCell(4), 7, 3), ids(2, below=7)))
case("rnn.EmbeddingWrapper: loop", lambda: loop(rnn.EmbeddingWrapper(rnn.GRUCell(4), 7, 3), inputs=ids(2, 5, 1)))
case("rnn.DropoutWrapper: drops", lambda: loop(rnn.DropoutWrapper(
    rnn.GRUCell(3), 0.5, 0.5, 0.5, variational_recurrent=True, input_size=3, dtype=tf.float32, seed=1)), values=False)
case("rnn.DropoutWrapper: seed", lambda: rnn.DropoutWrapper(rnn.BasicRNNCell(30), output_keep_prob=0.5, seed=1)(
    tf.zeros([2, 3]), tf.ones([2, 30])), values=False)
wrong("rnn.AttentionCellWrapper", lambda: rnn.AttentionCellWrapper(rnn.GRUCell(4), 0))
wrong("rnn.InputProjectionWrapper", lambda: rnn.InputProjectionWrapper(3, 3))
wrong("rnn.OutputProjectionWrapper", lambda: rnn.OutputProjectionWrapper(rnn.GRUCell(4), 0))
wrong("rnn.EmbeddingWrapper", lambda: rnn.EmbeddingWrapper(rnn.GRUCell(4), 0, 3))
wrong("rnn.MultiRNNCell", lambda: rnn.MultiRNNCell([]))
wrong("rnn.DropoutWrapper", lambda: rnn.DropoutWrapper(rnn.GRUCell(3), input_keep_prob=2.0))
wrong("rnn.GRUBlockCell", lambda: rnn.GRUBlockCell(3, 4))
wrong("rnn.LSTMCell", lambda: rnn.LSTMCell(3)(x(2, 3), x(2, 3)))
wrong("rnn.UGRNNCell", lambda: once(rnn.UGRNNCell(4), tf.placeholder(tf.float32)))


# Loops.
def steps(*shape):
    return tf.unstack(x(3, *shape))


case("rnn.static_rnn nn.static_rnn", lambda: rnn.static_rnn(rnn.GRUCell(4), steps(2, 3), dtype=tf.float32,
                                                            sequence_length=[3, 2]))
case("rnn.static_bidirectional_rnn nn.static_bidirectional_rnn", lambda: rnn.static_bidirectional_rnn(
    rnn.GRUCell(4), rnn.GRUCell(2), steps(2, 3), dtype=tf.float32, sequence_length=[3, 2]))
case("rnn.static_state_saving_rnn nn.static_state_saving_rnn", lambda: rnn.static_state_saving_rnn(
    rnn.GRUCell(4), steps(2, 3), Saver(), "s", sequence_length=[3, 2]))
case("rnn.stack_bidirectional_rnn", lambda: rnn.stack_bidirectional_rnn(
    [rnn.GRUCell(4), rnn.GRUCell(3)], [rnn.GRUCell(2), rnn.GRUCell(2)], steps(2, 3), dtype=tf.float32))
for _options in ({"time_major": True}, {"sequence_length": [5, 2], "scope": "own"}):
    case("rnn.stack_bidirectional_dynamic_rnn", lambda o=_options: rnn.stack_bidirectional_dynamic_rnn(
        [rnn.GRUCell(4)], [rnn.GRUCell(2)], x(2, 5, 3) if "time_major" not in o else x(
            5, 2, 3), dtype=tf.float32, **o))
wrong("rnn.stack_bidirectional_dynamic_rnn",
      lambda: rnn.stack_bidirectional_dynamic_rnn([], [], x(2, 5, 3), dtype=tf.float32))
wrong("rnn.stack_bidirectional_rnn",
      lambda: rnn.stack_bidirectional_rnn(rnn.GRUCell(3), rnn.GRUCell(3), steps(2, 3), dtype=tf.float32))
case("rnn.transpose_batch_time", lambda: [rnn.transpose_batch_time(each) for each in (
    x(2, 5, 3), unknown(x(2, 5, 3)), unknown(x(2, 5, 3), None, 5, 3), x(4))])
case("nn.dynamic_rnn", lambda: loop(rnn.GRUCell(4), inputs=unknown(x(2, 5, 3), None, None, 3)))
case("nn.bidirectional_dynamic_rnn", lambda: tf.nn.bidirectional_dynamic_rnn(
    rnn.LSTMCell(4), rnn.LSTMCell(2), x(2, 5, 3), [5, 3], dtype=tf.float32))


class Saver:
    """Layers that keep a state between batches."""

    def state(self, name):
        return tf.ones([2, 4])

    def save_state(self, name, state):
        return tf.identity(state)


# Fused cells.
for _lengths in (None, [5, 2]):
    case("rnn.FusedRNNCell rnn.FusedRNNCellAdaptor", lambda n=_lengths: rnn.FusedRNNCellAdaptor(rnn.GRUCell(4))(
        x(5, 2, 3), dtype=tf.float32, sequence_length=n))
    case("rnn.FusedRNNCellAdaptor: dynamic", lambda n=_lengths: rnn.FusedRNNCellAdaptor(rnn.GRUCell(4), True)(
        steps(2, 3), dtype=tf.float32, sequence_length=n))
    case("rnn.TimeReversedFusedRNN", lambda n=_lengths: rnn.TimeReversedFusedRNN(rnn.FusedRNNCellAdaptor(
        rnn.GRUCell(4), True))(x(5, 2, 3), dtype=tf.float32, sequence_length=n))
    case("rnn.LSTMBlockFusedCell rnn.LSTMBlockWrapper", lambda n=_lengths: rnn.LSTMBlockFusedCell(4)(
        x(5, 2, 3), dtype=tf.float32, sequence_length=n))
    case("rnn.LSTMBlockFusedCell: options", lambda n=_lengths: rnn.LSTMBlockFusedCell(
        4, use_peephole=True, cell_clip=0.4, forget_bias=0.3)(x(5, 2, 3), dtype=tf.float32, sequence_length=n))
case("rnn.LSTMBlockFusedCell: state", lambda: rnn.LSTMBlockFusedCell(4)(
    x(5, 2, 3), initial_state=(x(2, 4), x(2, 4, seed=1)), sequence_length=tf.constant([4, 0])))
case("recurrent.functional_rnn", lambda: tf.contrib.recurrent.functional_rnn(
    rnn.GRUCell(4), x(2, 5, 3), dtype=tf.float32))
case("recurrent.functional_rnn: lengths", lambda: tf.contrib.recurrent.functional_rnn(
    rnn.BasicLSTMCell(4), x(5, 2, 3), tf.constant([5, 2]), dtype=tf.float32, time_major=True, scope="own"))
case("recurrent.bidirectional_functional_rnn", lambda: tf.contrib.recurrent.bidirectional_functional_rnn(
    rnn.GRUCell(4), rnn.GRUCell(2), x(2, 5, 3), dtype=tf.float32))

# The operators of cuDNN need a GPU; their variables on checkpoints do not.
cudnn = tf.contrib.cudnn_rnn
case("cudnn_rnn.CudnnCompatibleLSTMCell", lambda: once(cudnn.CudnnCompatibleLSTMCell(4)))
case("cudnn_rnn.CudnnCompatibleGRUCell", lambda: once(cudnn.CudnnCompatibleGRUCell(4)))


# One family of layers and cells, whatever path a script takes to them.
def families():
    from tensorflow.python.keras.engine import base_layer
    from tensorflow.python.keras.layers import Layer
    from tensorflow.python.layers import base, core
    from tensorflow.python.ops import rnn_cell_impl

    cell, outer = plain.LSTMCell(3), (rnn.RNNCell, rnn_cell_impl.RNNCell, base.Layer, Layer, tf.keras.layers.Layer)
    pairs = [(core.Dense, base.Layer), (tf.layers.Dense, base.Layer), (core.Dense, tf.layers.Layer), (tf.layers.Dense,
        Layer),
             (tf.layers.Dense, tf.keras.layers.Layer), (tf.layers.Dense, base_layer.Layer),
             (rnn.BasicLSTMCell, rnn_cell_impl.RNNCell)]
    tuples = (plain.LSTMStateTuple, rnn.LSTMStateTuple, rnn_cell_impl.LSTMStateTuple)
    return [isinstance(cell, each) for each in outer], [issubclass(*pair) for pair in pairs], len(set(tuples))


def in_keras():
    """Mixed families looped for ever here."""
    def stop(*_):
        raise RuntimeError("tf.keras.layers.RNN of a cell of contrib hangs")

    before = signal.signal(signal.SIGALRM, stop)
    signal.alarm(60)
    try:
        return tf.keras.layers.RNN(rnn.BasicLSTMCell(4))(x(2, 3, 3))
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


case("rnn.RNNCell: families", families)
case("rnn.RNNCell: in Keras", in_keras)
