"""Float16 that float32 kernels imitate, in graphs whose order other passes of TensorFlow disturb.

Where it fails TensorFlow ends the process: a crash of this file is a failure of it.
"""

from __future__ import annotations

import numpy as np
import pytest
import tensorflow as tf

from npu_bridge.precision.rewriter import IMITATION
from tests.precision.small_models import precision_of, session_of, tf1

BATCH = np.random.RandomState(0).randn(8, 10, 16).astype(np.float32)


def recurrent(weights):
    state = tf1.while_loop(
        lambda step, state: step < 5,
        lambda step, state: (step + 1, tf.tanh(tf.matmul(state, weights))),
        [0, tf.constant(BATCH[:, 0])],
    )[1]
    return tf.matmul(state, weights)


def convolutional(weights):
    inputs = tf.nn.dropout(tf.nn.conv1d(tf.constant(BATCH), weights[None], 1, "VALID"), 0.3, seed=3)
    mean, variance = tf.nn.moments(inputs, [0, 1])
    return tf.nn.batch_normalization(inputs, mean, variance, None, None, 1e-3)


def losses_of(build, mode):
    with tf.Graph().as_default() as graph:
        tf1.set_random_seed(1)
        weights = tf1.get_variable("weights", [16, 16], initializer=tf1.glorot_uniform_initializer(seed=2))
        loss = tf.reduce_mean(tf.square(build(weights) - 1.0))
        train_op = tf1.train.AdamOptimizer(0.01).minimize(loss)
        with session_of(graph, precision_of(precision_mode_v2=mode)) as session:
            session.run(tf1.global_variables_initializer())
            return [session.run([loss, train_op])[0] for _ in range(3)]


@pytest.mark.parametrize("mode", ["cube_fp16in_fp32out", "mixed_float16", "fp16"])
@pytest.mark.parametrize("model", ["loop", "loop in functions", "convolution"])
def test_imitated_float16_trains(model, mode, monkeypatch):
    monkeypatch.setenv(IMITATION, "1")
    are_functions = tf1.control_flow_v2_enabled()
    (tf1.enable_control_flow_v2 if model == "loop in functions" else tf1.disable_control_flow_v2)()
    try:
        build = convolutional if model == "convolution" else recurrent
        rounded, exact = (losses_of(build, name) for name in (mode, "origin"))
    finally:
        (tf1.enable_control_flow_v2 if are_functions else tf1.disable_control_flow_v2)()
    assert rounded != exact
    np.testing.assert_allclose(rounded, exact, rtol=2e-2)
