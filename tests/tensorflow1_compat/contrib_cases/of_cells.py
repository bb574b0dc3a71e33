"""`tf.contrib.rnn`, `cudnn_rnn`, `recurrent` and `legacy_seq2seq` against numpy and plain cells."""

from __future__ import annotations

import numpy as np
import tensorflow.compat.v1 as tf

from tensorflow1_compat.contrib import cudnn_rnn, legacy_seq2seq, recurrent, rnn
from tensorflow1_compat.contrib.rnn.linear import _linear
from tests.tensorflow1_compat.contrib_cases.common import close, names, sigmoid, value

X = np.random.RandomState(0).randn(2, 3).astype(np.float32)
SEQUENCE = np.random.RandomState(1).randn(2, 5, 3).astype(np.float32)


def once(cell, state=None):
    """(values of output and state, values of variables by the last parts of their names)."""
    with tf.variable_scope("root", initializer=tf.random_normal_initializer(seed=3)):
        start = cell.zero_state(2, tf.float32) if state is None else state
        output, new = cell(tf.constant(X), start)
    with tf.Session() as session:
        session.run(tf.global_variables_initializer())
        found = session.run([output, new])
        return (*found, session.run({var.op.name.split("/", 2)[2]: var for var in tf.global_variables()}))


def case_old_names_are_the_same_cells():
    for name in ("BasicLSTMCell", "LSTMCell", "GRUCell", "MultiRNNCell", "DropoutWrapper", "LSTMStateTuple"):
        assert getattr(rnn, name) is getattr(tf.nn.rnn_cell, name)
    assert rnn.static_rnn is tf.nn.static_rnn


def case_layer_norm_lstm():
    cell = rnn.LayerNormBasicLSTMCell(4, norm_gain=1.5, norm_shift=0.1)
    h, state, weights = once(cell)

    def norm(x):
        return 1.5 * (x - x.mean(1, keepdims=True)) / x.std(1, keepdims=True) + 0.1

    i, j, f, o = (norm(part) for part in np.split(np.concatenate([X, np.zeros((2, 4))], 1) @ weights["kernel"], 4, 1))
    c = norm(sigmoid(i) * np.tanh(j))
    close(h, np.tanh(c) * sigmoid(o), 1e-4)
    close(state.c, c, 1e-4)
    gates = ("input", "transform", "forget", "output", "state")
    assert set(weights) == {"kernel", *(f"{gate}/{name}" for gate in gates for name in ("gamma", "beta"))}


def case_lstm_without_norm_has_a_bias():
    h, _, weights = once(rnn.LayerNormBasicLSTMCell(4, layer_norm=False))
    i, j, _, o = np.split(np.concatenate([X, np.zeros((2, 4))], 1) @ weights["kernel"], 4, 1)
    close(h, np.tanh(sigmoid(i) * np.tanh(j)) * sigmoid(o))
    assert set(weights) == {"kernel", "bias"}


def case_coupled_gates():
    start = tf.nn.rnn_cell.LSTMStateTuple(tf.ones([2, 4]), tf.ones([2, 2]))
    cell = rnn.CoupledInputForgetGateLSTMCell(4, use_peepholes=True, num_proj=2)
    h, state, weights = once(cell, start)
    j, f, o = np.split(np.concatenate([X, np.ones((2, 2))], 1) @ weights["kernel"] + weights["bias"], 3, 1)
    f = sigmoid(f + 1 + weights["w_f_diag"])
    c = f + (1 - f) * np.tanh(j)
    close(state.c, c)
    close(h, (sigmoid(o + weights["w_o_diag"] * c) * np.tanh(c)) @ weights["projection/kernel"])


def case_nas():
    h, state, weights = once(rnn.NASCell(4, num_proj=2, use_bias=True))
    b = np.split(X @ weights["kernel"], 8, 1)
    relu = lambda x: np.maximum(x, 0)  # noqa: E731
    first = np.tanh(sigmoid(b[0]) * relu(b[1]))
    c = np.tanh(first) * np.tanh(sigmoid(b[2]) + relu(b[3] * 0))
    last = np.tanh(np.tanh(np.tanh(b[4]) * sigmoid(b[5])) + sigmoid(np.tanh(b[6]) + sigmoid(b[7])))
    close(state.c, c)
    close(h, np.tanh(c * last) @ weights["projection_weights"])
    assert set(weights) == {"kernel", "recurrent_kernel", "bias", "projection_weights"}


def case_ugrnn_sru_indrnn():
    h, _, weights = once(rnn.UGRNNCell(4), tf.ones([2, 4]))
    g, c = np.split(np.concatenate([X, np.ones((2, 4))], 1) @ weights["kernel"] + weights["bias"], 2, 1)
    close(h, sigmoid(g + 1) + (1 - sigmoid(g + 1)) * np.tanh(c))
    with tf.Graph().as_default():
        h, c, weights = once(rnn.SRUCell(4), tf.ones([2, 4]))
        x, f, r, t = np.split(X @ weights["kernel"], 4, 1)
        f, r = sigmoid(f + weights["bias"][:4]), sigmoid(r + weights["bias"][4:])
        close(c, f + (1 - f) * x)
        close(h, r * np.tanh(c) + (1 - r) * t)
    with tf.Graph().as_default():
        h, _, weights = once(rnn.IndRNNCell(4), tf.ones([2, 4]))
        close(h, np.tanh(X @ weights["kernel_w"] + weights["recurrent_kernel_u"] + weights["bias"]))


def case_convolutions():
    image = tf.constant(np.random.RandomState(2).randn(2, 6, 5, 3), tf.float32)
    cell = rnn.Conv2DLSTMCell(input_shape=[6, 5, 3], output_channels=4, kernel_shape=[3, 3])
    h, state = cell(image, cell.zero_state(2, tf.float32))
    assert names() == ["conv_2d_lstm_cell/biases", "conv_2d_lstm_cell/kernel"]
    kernel = tf.global_variables()[0]
    i, j, f, o = tf.split(tf.nn.conv2d(tf.concat([image, tf.zeros([2, 6, 5, 4])], 3), kernel, 1, "SAME"), 4, 3)
    c = tf.sigmoid(i) * tf.tanh(j)
    found, expected = value([h, tf.tanh(c) * tf.sigmoid(o)])
    close(found, expected)
    outputs, _ = tf.nn.dynamic_rnn(
        rnn.Conv1DLSTMCell(input_shape=[5, 3], output_channels=4, kernel_shape=[3], skip_connection=True),
        tf.zeros([2, 7, 5, 3]), dtype=tf.float32,
    )  # fmt: skip
    assert outputs.shape.as_list() == [2, 7, 5, 7]


def case_blocks_are_the_plain_cells():
    x, start = tf.constant(SEQUENCE), tf.random_normal_initializer(seed=5)
    with tf.variable_scope("a", initializer=start):
        plain, state = tf.nn.dynamic_rnn(tf.nn.rnn_cell.BasicLSTMCell(4), x, [5, 3], dtype=tf.float32)
    with tf.variable_scope("b", initializer=start):
        block, block_state = tf.nn.dynamic_rnn(rnn.LSTMBlockCell(4), x, [5, 3], dtype=tf.float32)
    with tf.variable_scope("c", initializer=start):
        fused, fused_state = rnn.LSTMBlockFusedCell(4)(
            tf.transpose(x, [1, 0, 2]), dtype=tf.float32, sequence_length=[5, 3]
        )
    kernels = [var for var in tf.global_variables() if var.op.name.endswith("kernel")]
    assert [var.op.name for var in kernels] == ["a/rnn/basic_lstm_cell/kernel", "b/rnn/lstm_cell/kernel",
                                                "c/lstm_fused_cell/kernel"]  # fmt: skip
    with tf.Session() as session:
        session.run(tf.global_variables_initializer())
        for other in kernels[1:]:
            session.run(tf.assign(other, kernels[0]))
        a, b, c, states = session.run([plain, block, tf.transpose(fused, [1, 0, 2]), (state, block_state, fused_state)])
    close(a, b)
    close(a, c)
    close(states[0].c, states[1].c)
    close(states[0].h, states[2].h)


def case_block_cells_do_what_their_kernels_do():
    x, start = tf.constant(SEQUENCE), tf.random_normal_initializer(seed=5)
    options = {"forget_bias": 0.5, "cell_clip": 0.7, "use_peephole": True}
    with tf.variable_scope("root", initializer=start):
        cell, gru = rnn.LSTMBlockCell(4, **options), rnn.GRUBlockCell(3)
        _, state = cell(x[:, 0], cell.zero_state(2, tf.float32))
        lstm, _ = cell(x[:, 1], state)
        of_gru, _ = gru(x[:, 1], x[:, 0])
    part = {var.op.name.rsplit("/", 1)[1]: var for var in tf.global_variables()}
    outs = tf.raw_ops.LSTMBlockCell(
        x=x[:, 1], cs_prev=state.c, h_prev=state.h, w=part["kernel"], b=part["bias"], wci=part["w_i_diag"],
        wcf=part["w_f_diag"], wco=part["w_o_diag"], **options,
    )  # fmt: skip
    of_kernel = tf.raw_ops.GRUBlockCell(
        x=x[:, 1], h_prev=x[:, 0], w_ru=part["w_ru"], w_c=part["w_c"], b_ru=part["b_ru"], b_c=part["b_c"]
    )
    with tf.Session() as session:
        session.run(tf.global_variables_initializer())
        cells, *found = session.run([outs.cs, lstm, outs.h, of_gru, of_kernel.h])
    assert np.abs(cells).max() == np.float32(0.7), "no value reached the bound"
    close(*found[:2])
    close(*found[2:])


def case_a_block_cell_has_the_gradient_of_the_sequence():
    x, start = tf.constant(SEQUENCE), tf.random_normal_initializer(seed=5)
    with tf.variable_scope("a", initializer=start):
        fused, _ = rnn.LSTMBlockFusedCell(4, use_peephole=True)(tf.unstack(x, axis=1), dtype=tf.float32)
    with tf.variable_scope("b", initializer=start):
        outputs, _ = tf.nn.dynamic_rnn(rnn.LSTMBlockCell(4, use_peephole=True), x, dtype=tf.float32)
    assert isinstance(fused, list) and len(fused) == 5
    results = {"a": tf.stack(fused, axis=1), "b": outputs}
    own = {part: tf.trainable_variables(part) for part in results}
    gradients = {part: tf.gradients(tf.reduce_sum(result**2), own[part]) for part, result in results.items()}
    with tf.Session() as session:
        session.run(tf.global_variables_initializer())
        for ours, theirs in zip(own["b"], own["a"]):
            session.run(tf.assign(ours, theirs))
        found = session.run(gradients)
        close(*session.run([results["a"], results["b"]]))
    assert len(found["a"]) == len(found["b"]) == 5
    for of_sequence, of_cell in zip(found["a"], found["b"]):
        assert np.abs(of_sequence).max() > 0
        np.testing.assert_allclose(of_cell, of_sequence, rtol=1e-4, atol=1e-6)


def case_cells_of_one_kernel_can_be_trained():
    x = tf.constant(SEQUENCE)
    for name, make in {
        "LSTMBlockCell": lambda: rnn.LSTMBlockCell(4), "GRUBlockCell": lambda: rnn.GRUBlockCell(4),
        "CudnnCompatibleLSTMCell": lambda: cudnn_rnn.CudnnCompatibleLSTMCell(4),
    }.items():  # fmt: skip
        with tf.variable_scope(name):
            outputs, _ = tf.nn.dynamic_rnn(make(), x, dtype=tf.float32)
            train(name, outputs)
    backwards, _ = rnn.TimeReversedFusedRNN(rnn.LSTMBlockFusedCell(4))(
        tf.transpose(x, [1, 0, 2]), dtype=tf.float32, sequence_length=[5, 3]
    )
    train("TimeReversedFusedRNN", backwards)
    train("CudnnLSTM", cudnn_rnn.CudnnLSTM(2, 4)(tf.transpose(x, [1, 0, 2]))[0])


def train(name, outputs):
    loss = tf.reduce_mean((outputs - 0.3) ** 2)
    step = tf.train.AdamOptimizer(0.05).minimize(loss)
    with tf.Session() as session:
        session.run(tf.global_variables_initializer())
        first = session.run(loss)
        for _ in range(30):
            session.run(step)
        assert session.run(loss) < 0.5 * first, name


def case_gru_block():
    x = tf.constant(SEQUENCE)
    with tf.variable_scope("a"):
        plain, _ = tf.nn.dynamic_rnn(tf.nn.rnn_cell.GRUCell(4), x, dtype=tf.float32)
    with tf.variable_scope("b"):
        block, _ = tf.nn.dynamic_rnn(rnn.GRUBlockCellV2(4), x, dtype=tf.float32)
    own = [var for var in tf.global_variables() if var.op.name.startswith("a/")]
    assert names()[4:] == ["b/rnn/gru_cell/" + var.op.name.split("/", 3)[3] for var in
                           sorted(own, key=lambda var: var.op.name)]  # fmt: skip
    by_name = {var.op.name: var for var in tf.global_variables()}
    with tf.Session() as session:
        session.run(tf.global_variables_initializer())
        for var in own:
            session.run(tf.assign(by_name["b" + var.op.name[1:]], var))
        close(*session.run([plain, block]))


def case_wrappers():
    inputs = tf.constant(X)
    for wrap, size, variables in (
        (lambda cell: rnn.InputProjectionWrapper(cell, 7), 4, {"kernel", "bias"}),
        (lambda cell: rnn.OutputProjectionWrapper(cell, 7), 7, {"kernel", "bias"}),
        (lambda cell: rnn.AttentionCellWrapper(cell, 3), 4, None),
        (lambda cell: rnn.CompiledWrapper(cell), 4, None),
    ):
        with tf.Graph().as_default():
            cell = wrap(tf.nn.rnn_cell.GRUCell(4))
            outputs, _ = tf.nn.dynamic_rnn(cell, tf.constant(SEQUENCE), dtype=tf.float32)
            assert outputs.shape.as_list() == [2, 5, size]
            assert np.isfinite(value(outputs)).all()
            if variables:
                ends = {name.rsplit("/", 1)[1] for name in names() if "gru_cell" not in name}
                assert ends == variables
    cell = rnn.EmbeddingWrapper(tf.nn.rnn_cell.GRUCell(4), 10, 6)
    cell(tf.constant([1, 2]), cell.zero_state(2, tf.float32))
    assert any(name.endswith("embedding_wrapper/embedding") for name in names())
    assert rnn.HighwayWrapper(tf.nn.rnn_cell.GRUCell(3))(inputs, tf.zeros([2, 3]))[0].shape.as_list() == [2, 3]


def case_linear():
    with tf.variable_scope("scope"):
        found = _linear([tf.constant(X), tf.constant(X)], 4, True, tf.ones_initializer(), tf.ones_initializer())
    close(value(found), np.repeat(2 * X.sum(1, keepdims=True) + 1, 4, 1))
    assert names() == ["scope/bias", "scope/kernel"]


def case_stacked_both_ways():
    cells = lambda: [tf.nn.rnn_cell.GRUCell(4), tf.nn.rnn_cell.GRUCell(5)]  # noqa: E731
    outputs, forward, backward = rnn.stack_bidirectional_dynamic_rnn(
        cells(), cells(), tf.constant(SEQUENCE), dtype=tf.float32, sequence_length=[5, 2]
    )
    assert outputs.shape.as_list() == [2, 5, 10] and len(forward) == len(backward) == 2
    assert "stack_bidirectional_rnn/cell_1/bidirectional_rnn/bw/gru_cell/gates/kernel" in names()
    found, first = value([outputs, forward[1]])
    assert not found[1, 2:].any()
    close(found[1, 1, :5], first[1])
    listed, _, _ = rnn.stack_bidirectional_rnn(
        cells(), cells(), tf.unstack(tf.constant(SEQUENCE), axis=1), dtype=tf.float32, scope="s"
    )
    assert len(listed) == 5


def case_fused_adaptors():
    x = tf.constant(SEQUENCE.transpose(1, 0, 2))
    fused = rnn.FusedRNNCellAdaptor(tf.nn.rnn_cell.BasicRNNCell(4), use_dynamic_rnn=True)
    outputs, _ = fused(x, dtype=tf.float32, scope="rnn")
    with tf.variable_scope("", reuse=True):
        turned, state = rnn.TimeReversedFusedRNN(fused)(x, dtype=tf.float32, scope="rnn")
    assert outputs.shape.as_list() == turned.shape.as_list() == [5, 2, 4]
    first, last = value([turned[0], state])
    close(first, last)


def case_cudnn_lstm():
    layer = cudnn_rnn.CudnnLSTM(2, 4, direction="bidirectional")
    x = SEQUENCE.transpose(1, 0, 2)
    outputs, (h, c) = layer(tf.constant(x))
    assert outputs.shape.as_list()[2] == 8
    prefix = "cudnn_lstm/stack_bidirectional_rnn/cell_0/bidirectional_rnn/fw/cudnn_compatible_lstm_cell/"
    assert prefix + "kernel" in names() and prefix + "bias" in names() and len(names()) == 8
    found, last, cells = value([outputs, h, c])
    assert last.shape == cells.shape == (4, 2, 4)
    close(found[-1, :, :4], last[2])
    close(found[0, :, 4:], last[3])
    again, _ = layer(tf.constant(x), training=False)
    assert len(names()) == 8 and again.shape[2] == 8


def case_cudnn_gru_and_plain():
    x = tf.constant(SEQUENCE.transpose(1, 0, 2))
    outputs, (state,) = cudnn_rnn.CudnnGRU(1, 4)(x, initial_state=(tf.ones([1, 2, 4]),), sequence_lengths=[5, 3])
    found, last = value([outputs, state])
    close(found[2, 1], last[0, 1])
    assert "cudnn_gru/rnn/multi_rnn_cell/cell_0/cudnn_compatible_gru_cell/candidate/input_projection/kernel" in names()
    for layer in (cudnn_rnn.CudnnRNNTanh(1, 4), cudnn_rnn.CudnnRNNRelu(1, 4)):
        assert layer(x)[0].shape.as_list()[2] == 4


def case_functional_rnn():
    cell = tf.nn.rnn_cell.BasicRNNCell(4)
    outputs, state = recurrent.functional_rnn(cell, tf.constant(SEQUENCE), [5, 3], dtype=tf.float32, reverse=True)
    found, last = value([outputs, state])
    close(found[:, 0], last)
    pair, _ = recurrent.bidirectional_functional_rnn(
        tf.nn.rnn_cell.GRUCell(4), tf.nn.rnn_cell.GRUCell(4), tf.constant(SEQUENCE), dtype=tf.float32
    )
    assert len(pair) == 2


def case_legacy_loss_and_decoders():
    logits = [tf.constant(np.eye(3)[[0, 1]] * 5, tf.float32)] * 2
    targets, weights = [tf.constant([0, 1])] * 2, [tf.constant([1.0, 1.0]), tf.constant([1.0, 0.0])]
    each = -np.log(np.exp(5) / (np.exp(5) + 2))
    by_example, total = value([
        legacy_seq2seq.sequence_loss_by_example(logits, targets, weights, average_across_timesteps=False),
        legacy_seq2seq.sequence_loss(logits, targets, weights),
    ])  # fmt: skip
    close(by_example, [2 * each, each], 1e-4)
    close(total, each, 1e-4)
    inputs = tf.unstack(tf.constant(SEQUENCE), axis=1)
    cell = tf.nn.rnn_cell.GRUCell(4)
    outputs, state = legacy_seq2seq.rnn_decoder(inputs, tf.zeros([2, 4]), cell)
    found, last = value([outputs, state])
    close(found[-1], last)
    outputs, _ = legacy_seq2seq.attention_decoder(
        inputs, tf.zeros([2, 4]), tf.ones([2, 6, 4]), tf.nn.rnn_cell.GRUCell(4), output_size=7
    )
    assert len(outputs) == 5 and np.shape(value(outputs[-1])) == (2, 7)
    assert {"attention_decoder/AttnW_0", "attention_decoder/AttnV_0"} <= set(names())
    outputs, _ = legacy_seq2seq.embedding_attention_decoder(
        [tf.constant([1, 2])] * 3, tf.zeros([2, 4]), tf.ones([2, 6, 4]), tf.nn.rnn_cell.GRUCell(4), 9, 4,
        output_size=9, feed_previous=True, scope="e",
    )  # fmt: skip
    assert np.isfinite(value(outputs)).all()
