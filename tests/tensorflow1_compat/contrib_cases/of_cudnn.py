"""`tf.contrib.cudnn_rnn`, whose genuine layers need a GPU."""

from __future__ import annotations

import numpy as np
import tensorflow.compat.v1 as tf

from tensorflow1_compat.contrib import cudnn_rnn
from tests.tensorflow1_compat.contrib_cases.common import close, names, value

SEQUENCE = np.random.RandomState(1).randn(2, 5, 3).astype(np.float32)


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


def case_each_gate_starts_with_values_of_its_own():
    x, ones, orthogonal = tf.zeros([1, 1, 32]), tf.ones_initializer(), tf.orthogonal_initializer()
    cudnn_rnn.CudnnLSTM(1, 32, name="a", bias_initializer=ones)(x)
    cudnn_rnn.CudnnGRU(1, 32, name="b")(x)
    cudnn_rnn.CudnnGRU(1, 32, name="c", kernel_initializer=orthogonal, bias_initializer=ones)(x)
    found = value({var.op.name.replace("/rnn/multi_rnn_cell/cell_0", ""): var for var in tf.global_variables()})
    kernel, limit = found["a/cudnn_compatible_lstm_cell/kernel"], np.sqrt(6 / (32 + 32))
    assert all(0.95 * limit < abs(each).max() <= limit for half in np.split(kernel, 2) for each in np.split(half, 4, 1))
    close(found["a/cudnn_compatible_lstm_cell/bias"], 2)  # of inputs and of the state, added up
    assert not found["b/cudnn_compatible_gru_cell/gates/bias"].any()
    close(found["c/cudnn_compatible_gru_cell/gates/bias"], 2)
    close(found["c/cudnn_compatible_gru_cell/candidate/hidden_projection/bias"], 1)
    for half in np.split(found["c/cudnn_compatible_gru_cell/gates/kernel"], 2):
        close(half[:, :32].T @ half[:, :32], np.eye(32))


def case_each_layer_has_variables_of_its_own():
    with tf.variable_scope("", reuse=tf.AUTO_REUSE):
        for layer in (cudnn_rnn.CudnnRNNTanh(1, 4), cudnn_rnn.CudnnRNNTanh(1, 4)):
            layer(tf.constant(SEQUENCE))
            layer(tf.constant(SEQUENCE))
            assert len(layer.variables) == 2
    assert sorted({name.split("/")[0] for name in names()}) == ["cudnn_rnn_tanh", "cudnn_rnn_tanh_1"]
