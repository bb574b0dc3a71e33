"""Recurrent layers and cells against loops in numpy."""

from __future__ import annotations

import numpy as np
import pytest
import tensorflow as tf

from npu_bridge.estimator import npu_ops
from npu_bridge.estimator.npu.npu_dynamic_rnn import DynamicAUGRU, DynamicGRUV2, DynamicRNN
from npu_bridge.estimator.npu.npu_rnn import npu_dynamic_rnn
from tests.operators.computing import close, computed, differentiable, tf1_graph
from tests.ranks.ways import started_session

tf1 = tf.compat.v1
STEPS, BATCH, DEPTH, HIDDEN = 5, 3, 4, 2
LENGTHS = np.array([5, 2, 4])
RANDOM = np.random.default_rng(9)


def draw(*shape):
    return RANDOM.normal(0, 0.7, size=shape).astype(np.float32)


X, ATTENTION = draw(STEPS, BATCH, DEPTH), RANDOM.random([STEPS, BATCH]).astype(np.float32)


def sigmoid(x):
    return 1 / (1 + np.exp(-x))


def lstm(x, w, b, h, c, forget_bias=0.0, lengths=None):
    """All outputs of all steps; past the end the state stays and the rest is 0."""
    outputs = []
    for step, values in enumerate(x):
        i, j, f, o = np.split(np.concatenate([values, h], 1) @ w + b, 4, axis=1)
        i, j, f, o = sigmoid(i), np.tanh(j), sigmoid(f + forget_bias), sigmoid(o)
        new_c = f * c + i * j
        new_h = o * np.tanh(new_c)
        running = np.ones([len(h), 1], bool) if lengths is None else (step < lengths)[:, np.newaxis]
        h, c = np.where(running, new_h, h), np.where(running, new_c, c)
        others = [np.where(running, value, 0) for value in (new_h, i, j, f, o, np.tanh(new_c))]
        outputs.append([others[0], h, c, *others[1:]])
    return [np.stack(values).astype(np.float32) for values in zip(*outputs)]


def gru(x, weights, h, order="zrh", reset_after=True, attention=None, lengths=None):
    of_input, of_hidden, input_bias, hidden_bias = weights
    outputs = []
    for step, values in enumerate(x):
        gates = dict(zip(order, np.split(values @ of_input + input_bias, 3, axis=1)))
        u = dict(zip(order, np.split(of_hidden, 3, axis=1)))
        c = dict(zip(order, np.split(hidden_bias, 3)))
        update, reset = (sigmoid(gates[g] + h @ u[g] + c[g]) for g in "zr")
        hidden_new = h @ u["h"] + c["h"] if reset_after else (reset * h) @ u["h"] + c["h"]
        new = np.tanh(gates["h"] + (reset * hidden_new if reset_after else hidden_new))
        weakened = update if attention is None else (1 - attention[step][:, np.newaxis]) * update
        new_h = (1 - weakened) * new + weakened * h
        running = np.ones([len(h), 1], bool) if lengths is None else (step < lengths)[:, np.newaxis]
        h = np.where(running, new_h, h)
        gates = [update, *([] if attention is None else [weakened]), reset, new, hidden_new]
        y, *others = (np.where(running, value, 0) for value in (new_h, *gates))
        outputs.append([y, h, *others])
    return [np.stack(values).astype(np.float32) for values in zip(*outputs)]


@pytest.fixture(params=[False, True], ids=["TF 2", "TF 1"])
def any_graph(request):
    """A graph with the behaviour of TensorFlow 2, and one with that of 1."""
    with tf1_graph() if request.param else tf.Graph().as_default():
        yield


def all_close(actual, expected):
    assert len(actual) == len(expected)
    for one, other in zip(actual, expected):
        close(one, other)


def built(layer, *arguments):
    """A layer whose weights, biases included, are drawn at random."""
    layer(*arguments)
    layer.set_weights([value if value.dtype == np.int32 else draw(*value.shape) for value in layer.get_weights()])
    return layer, [value for value in layer.get_weights() if value.dtype != np.int32]


@pytest.mark.parametrize("lengths", [None, LENGTHS])
@pytest.mark.parametrize("forget_bias", [0.0, 1.0])
def test_lstm_layer(forget_bias, lengths):
    layer, (w, b) = built(DynamicRNN(HIDDEN, tf.float32, forget_bias=forget_bias), X)
    h, c = draw(1, BATCH, HIDDEN), draw(1, BATCH, HIDDEN)
    all_close(layer(X, lengths, h, c), lstm(X, w, b, h[0], c[0], forget_bias, lengths))
    zeros = np.zeros([BATCH, HIDDEN])
    all_close(layer(X, seq_length=lengths), lstm(X, w, b, zeros, zeros, forget_bias, lengths))
    all_close(layer(X, lengths, weight=2 * w, bias=-b), lstm(X, 2 * w, -b, zeros, zeros, forget_bias, lengths))


@pytest.mark.filterwarnings("ignore:.*rnn_cell.* is deprecated")
def test_lstm_layer_agrees_with_the_cell_of_tensorflow(graph):
    layer = DynamicRNN(HIDDEN, tf.float32, forget_bias=1.0)
    y, output_h, output_c, *_ = layer(X, seq_length=LENGTHS)
    cell = tf1.nn.rnn_cell.BasicLSTMCell(HIDDEN, forget_bias=1.0)
    outputs, state = tf1.nn.dynamic_rnn(cell, tf.constant(X), LENGTHS, dtype=tf.float32, time_major=True)
    w, b, _ = layer.weights
    copies = [tf1.assign(theirs, ours) for theirs, ours in zip(cell.weights, (w, b))]
    with started_session() as session:
        session.run(copies)
        ours, theirs = session.run([(y, output_c[-1], output_h[-1]), (outputs, *state)])
    all_close(ours, theirs)


def back(values, lengths):
    """Sequences in the opposite order; what lies past their ends stays."""
    turned = values.copy()
    for n, length in enumerate(lengths):
        turned[:length, n] = values[:length, n][::-1]
    return turned


@pytest.mark.parametrize("lengths", [None, LENGTHS])
def test_both_directions(lengths):
    layer, (w, b) = built(DynamicRNN(HIDDEN, tf.float32, direction="BIDIRECTIONAL"), X)
    assert w.shape == (2, DEPTH + HIDDEN, 4 * HIDDEN) and b.shape == (2, 4 * HIDDEN)
    h, c = draw(2, BATCH, HIDDEN), draw(2, BATCH, HIDDEN)
    ends = [STEPS] * BATCH if lengths is None else lengths
    forwards = lstm(X, w[0], b[0], h[0], c[0], lengths=lengths)
    backwards = lstm(back(X, ends), w[1], b[1], h[1], c[1], lengths=lengths)
    expected = [np.stack([one, back(other, ends)]) for one, other in zip(forwards, backwards)]
    all_close(layer(X, lengths, h, c), expected)


@pytest.mark.parametrize("lengths", [None, LENGTHS])
@pytest.mark.parametrize("reset_after", [True, False])
@pytest.mark.parametrize("order", ["zrh", "rzh"])
def test_gru_layers(order, reset_after, lengths):
    h = draw(BATCH, HIDDEN)
    plain, weights = built(DynamicGRUV2(HIDDEN, tf.float32, gate_order=order, reset_after=reset_after), X)
    all_close(plain(X, lengths, h), gru(X, weights, h, order, reset_after, lengths=lengths))
    all_close(plain(X, lengths), gru(X, weights, 0 * h, order, reset_after, lengths=lengths))
    attentional, weights = built(
        DynamicAUGRU(HIDDEN, tf.float32, gate_order=order, reset_after=reset_after), X, ATTENTION
    )
    all_close(attentional(X, ATTENTION, lengths, h), gru(X, weights, h, order, reset_after, ATTENTION, lengths))


def test_gru_layer_agrees_with_keras():
    layer, (of_input, of_hidden, input_bias, hidden_bias) = built(DynamicGRUV2(HIDDEN, tf.float32), X)
    theirs = tf.keras.layers.GRU(HIDDEN, return_sequences=True, time_major=True, reset_after=True)
    theirs.build(X.shape)
    theirs.set_weights([of_input, of_hidden, np.stack([input_bias, hidden_bias])])
    close(layer(X)[0], theirs(X))


def test_gru_weights_are_drawn_within_the_bound_of_the_hidden_size():
    layer = DynamicGRUV2(HIDDEN, tf.float32)
    layer(np.ones([1, 1, 64], np.float32))
    assert 64**-0.5 < np.abs(layer.get_weights()[0]).max() <= HIDDEN**-0.5


@pytest.mark.parametrize("make", [DynamicRNN, DynamicGRUV2])
def test_inputs_are_cast_in_scripts_without_version_2_as_well(make):
    tf1.keras.layers.disable_v2_dtype_behavior()
    try:
        outputs = make(HIDDEN, tf.float16)(tf.constant(X, tf.float32))
    finally:
        tf1.keras.layers.enable_v2_dtype_behavior()
    assert {value.dtype for value in outputs} == {tf.float16}


@pytest.mark.parametrize("make", [DynamicRNN, DynamicGRUV2])
def test_half_precision(make):
    layer = make(HIDDEN, tf.float16)
    outputs = layer(X, LENGTHS)
    assert {value.dtype for value in outputs} == {tf.float16}
    assert {weight.dtype for weight in layer.trainable_weights} == {tf.float16}
    single = make(HIDDEN, tf.float32)
    single(X)
    single.set_weights(layer.get_weights())
    np.testing.assert_allclose(outputs[0], single(X, LENGTHS)[0], atol=4e-3)


def test_gradients():
    w, b = draw(DEPTH + HIDDEN, 4 * HIDDEN), draw(4 * HIDDEN)
    layer, _ = built(DynamicRNN(HIDDEN, tf.float32), X)
    differentiable(lambda x, w, b: layer(x, LENGTHS, weight=w, bias=b)[0] ** 2, X, w, b)
    gru_layer, _ = built(DynamicAUGRU(HIDDEN, tf.float32), X, ATTENTION)
    differentiable(lambda x, attention: gru_layer(x, attention, LENGTHS)[0] ** 2, X, ATTENTION)


def test_a_model_can_have_two_layers_of_a_class():
    x = tf.keras.Input([BATCH, DEPTH], batch_size=STEPS)
    states = DynamicGRUV2(HIDDEN, tf.float32, name="second")(DynamicGRUV2(HIDDEN, tf.float32)(x)[0])[0]
    copy = tf.keras.models.clone_model(tf.keras.Model(x, states))
    assert [layer.name for layer in copy.layers[1:]] == ["dynamicgruv2", "second"]


@pytest.mark.slow("trains both layers")
def test_layers_train_in_a_graph_with_a_batch_of_any_size(any_graph):
    tf.keras.utils.set_random_seed(1)
    x = tf1.placeholder(tf.float32, [STEPS, None, DEPTH])
    layers = [DynamicRNN(HIDDEN, tf.float32), DynamicRNN(HIDDEN, tf.float32, direction="BIDIRECTIONAL")]
    layers += [DynamicGRUV2(HIDDEN, tf.float32)]
    outputs = [layer(x)[0] for layer in layers]
    sizes = [STEPS, None, HIDDEN]
    assert [output.shape.as_list() for output in outputs] == [sizes, [2, *sizes], sizes]
    loss = tf.add_n([tf.reduce_mean(tf.square(output - 0.5)) for output in outputs])
    train = tf1.train.AdamOptimizer(0.2).minimize(loss)
    names = {variable.op.name: variable.shape.as_list() for variable in tf1.trainable_variables()}
    assert names == {
        "dynamicrnn/w": [6, 8],
        "dynamicrnn/b": [8],
        "dynamicrnn_1/w": [2, 6, 8],
        "dynamicrnn_1/b": [2, 8],
        "dynamicgruv2/weight_input": [4, 6],
        "dynamicgruv2/weight_hidden": [2, 6],
        "dynamicgruv2/bias_input": [6],
        "dynamicgruv2/bias_hidden": [6],
    }
    with started_session() as session:
        before, *_ = losses = [session.run([loss, train], {x: draw(STEPS, 2 + i % 3, DEPTH)})[0] for i in range(20)]
        assert losses[-1] < before / 2
        assert all(np.isfinite(losses))


@pytest.mark.few_fast("each", "not every pair")
@pytest.mark.parametrize("make", [DynamicRNN, DynamicGRUV2])
@pytest.mark.parametrize("batch, entries", [(BATCH, BATCH), (None, 16)])
@pytest.mark.parametrize("steps, value", [(STEPS, STEPS), (None, 1)])
def test_variable_of_lengths_is_in_checkpoints(make, batch, entries, steps, value, any_graph):
    make(HIDDEN, tf.float32)(tf1.placeholder(tf.float32, [steps, batch, DEPTH]))
    (lengths,) = (variable for variable in tf1.global_variables() if variable.name == "dynamicbase/seq_length:0")
    assert lengths not in tf1.trainable_variables()
    with started_session() as session:
        close(session.run(lengths), np.full([entries], value, np.int32))


def test_first_weights():
    rnn, gru_layer = DynamicRNN(64, tf.float32), DynamicGRUV2(64, tf.float32)
    rnn(np.ones([1, 1, 64], np.float32))
    gru_layer(np.ones([1, 1, 64], np.float32))
    w, b, _ = rnn.get_weights()
    glorot = np.sqrt(6 / (128 + 256))
    assert not b.any() and 0.99 * glorot < np.abs(w).max() <= glorot
    for value in gru_layer.get_weights()[:4]:
        assert 0.9 / 8 < np.abs(value).max() <= 1 / 8


def test_arguments_can_be_read_and_not_set():
    given = {"hidden_size": 7, "direction": "BIDIRECTIONAL", "forget_bias": 0.5, "is_training": False, "cell_clip": -1}
    layer = DynamicRNN(dtype=tf.float32, **given)
    assert {name: getattr(layer, name) for name in given} == given
    assert (layer.dtype, layer.cell_type, layer.time_major, layer.num_proj) == ("float32", "LSTM", True, 0)
    assert DynamicRNN(**layer.get_config()).get_config() == layer.get_config()
    gru_layer = DynamicGRUV2(7, "float16", gate_order="rzh", reset_after=False)
    assert (gru_layer.gate_order, gru_layer.reset_after, gru_layer.keep_prob) == ("rzh", False, 1.0)
    for name in (*given, "gate_order"):
        with pytest.raises(AttributeError):
            setattr(layer if name in given else gru_layer, name, 1)


@pytest.mark.parametrize(
    "make, change, error",
    [
        (DynamicRNN, {"cell_type": "GRU"}, ValueError),
        (DynamicRNN, {"direction": "REDIRECTIONAL"}, ValueError),
        (DynamicRNN, {"cell_depth": 2}, ValueError),
        (DynamicRNN, {"use_peephole": True}, ValueError),
        (DynamicRNN, {"keep_prob": 0.5}, ValueError),
        (DynamicRNN, {"cell_clip": 1.0}, ValueError),
        (DynamicRNN, {"num_proj": 3}, ValueError),
        (DynamicRNN, {"time_major": False}, ValueError),
        (DynamicRNN, {"activation": "relu"}, ValueError),
        (DynamicRNN, {"dtype": tf.int32}, ValueError),
        (DynamicGRUV2, {"gate_order": "hzr"}, ValueError),
        (DynamicGRUV2, {"direction": "BIDIRECTIONAL"}, NotImplementedError),
        (DynamicAUGRU, {"activation": "relu"}, ValueError),
    ],
)
def test_illegal_arguments(make, change, error):
    with pytest.raises(error, match=f"{make.__name__}: .*Expected .* got "):
        make(**{"hidden_size": HIDDEN, "dtype": tf.float32, **change})


def test_depth_must_be_known(any_graph):
    with pytest.raises(ValueError, match="DynamicRNN: the depth of x is unknown"):
        DynamicRNN(HIDDEN, tf.float32)(tf1.placeholder(tf.float32, [STEPS, BATCH, None]))


def test_one_step():
    x, h, c = draw(BATCH, DEPTH), draw(BATCH, HIDDEN), draw(BATCH, HIDDEN)
    w, b = draw(DEPTH + HIDDEN, 4 * HIDDEN), draw(4 * HIDDEN)
    new = computed(lambda *given: npu_ops.basic_lstm_cell(*given, 1.0, 1.0, True, "tanh"), x, h, c, w, b)
    _, new_h, new_c, i, j, f, o, tanh_c = (values[0] for values in lstm(x[np.newaxis], w, b, h, c, 1.0))
    all_close(new, [new_c, new_h, i, j, f, o, tanh_c])
    for keep_prob, activation in ((0.5, "tanh"), (1.0, "relu")):
        with pytest.raises(ValueError, match="basic_lstm_cell: .* unsupported value"):
            npu_ops.basic_lstm_cell(x, h, c, w, b, keep_prob, 1.0, True, activation)


@pytest.mark.filterwarnings("ignore:.*rnn_cell.* is deprecated")
def test_unrolled_rnn_is_the_static_one_of_tensorflow(any_graph):
    cells = [tf1.nn.rnn_cell.GRUCell(HIDDEN, name="gru_cell") for _ in range(2)]
    outputs, state = npu_dynamic_rnn(cells[0], X, dtype=tf.float32, sequence_length=LENGTHS)
    with tf1.variable_scope("", reuse=True):
        theirs, their_state = tf1.nn.dynamic_rnn(cells[1], tf.constant(X), LENGTHS, dtype=tf.float32, time_major=True)
    assert {variable.op.name for variable in tf1.global_variables()} == {
        f"rnn/gru_cell/{part}/{name}" for part in ("gates", "candidate") for name in ("kernel", "bias")
    }
    with started_session() as session:
        all_close(*session.run([(outputs, state), (theirs, their_state)]))
    with pytest.raises(ValueError, match="npu_dynamic_rnn: the number of time steps is unknown"):
        npu_dynamic_rnn(cells[0], tf1.placeholder(tf.float32, [None, BATCH, DEPTH]), dtype=tf.float32)
