"""Float16 that float32 kernels imitate, in graphs whose order other passes of TensorFlow disturb.

Where it fails TensorFlow ends the process: a crash of this file is a failure of it.
"""

from __future__ import annotations

import json

import numpy as np
import pytest
import tensorflow as tf

from npu_bridge.base.errors import say_once
from npu_bridge.session.precision import kernels
from npu_bridge.session.precision.rewriter import IMITATION
from tests.session.precision.small_models import (
    Dense,
    dtypes_of,
    precision_of,
    remember_speed,
    run_with_graph,
    session_of,
    tf1,
)

BATCH = np.random.RandomState(0).randn(8, 10, 16).astype(np.float32)


def recurrent(weights):
    state = tf1.while_loop(
        lambda step, state: step < 5,
        lambda step, state: (step + 1, tf.tanh(tf.matmul(state, weights))),
        [0, tf.constant(BATCH[:, 0])],
    )[1]
    return tf.matmul(tf.matmul(state, weights), weights)


def conditional(weights):
    state = tf.cond(tf.reduce_sum(weights) > 1e9, lambda: tf.constant(BATCH[:, 1]), lambda: tf.constant(BATCH[:, 0]))
    for _ in range(2):
        state = called(tf.matmul(state, weights), weights)
    return state


@tf.function(autograph=False)
def called(state, weights):
    return tf.matmul(tf.matmul(tf.tanh(state), weights), weights)


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
@pytest.mark.parametrize("model", ["loop", "loop in functions", "calls", "convolution"])
def test_imitated_float16_trains(model, mode, monkeypatch):
    monkeypatch.setenv(IMITATION, "1")
    are_functions = tf1.control_flow_v2_enabled()
    (tf1.enable_control_flow_v2 if model in ("loop in functions", "calls") else tf1.disable_control_flow_v2)()
    try:
        build = {"convolution": convolutional, "calls": conditional}.get(model, recurrent)
        rounded, exact = (losses_of(build, name) for name in (mode, "origin"))
    finally:
        (tf1.enable_control_flow_v2 if are_functions else tf1.disable_control_flow_v2)()
    assert rounded != exact
    np.testing.assert_allclose(rounded, exact, rtol=2e-2)


@pytest.fixture
def remembered(monkeypatch, tmp_path):
    """Writes what an earlier process measured on this CPU, and lets messages be said anew."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))

    def remember(real_msecs, imitated_msecs):
        remember_speed(tmp_path, real_msecs, imitated_msecs)
        say_once.cache_clear()

    yield remember
    kernels.float16_speed.cache_clear()


def matrix_dtypes(**keys):
    model = Dense()
    with session_of(model.graph, precision_of(**keys)) as session:
        session.run(model.init)
        return dtypes_of(run_with_graph(session, [model.train_op, model.loss], model.batch(0))[1])


@pytest.mark.parametrize("mode", ["mixed_float16", "fp16"])
def test_the_faster_of_both_ways_is_taken_and_said(mode, remembered, caplog):
    caplog.set_level("INFO")
    for real, imitated, dtype, words in (
        (1.0, 45.0, "float16", "float16 kernels are used"),
        (45.0, 1.5, "float32", "float32 kernels on values rounded to float16"),
    ):
        remembered(real, imitated)
        caplog.clear()
        assert matrix_dtypes(precision_mode_v2=mode) == {dtype: 5}
        assert [words in line and "45 ms" in line for line in caplog.messages if "measured" in line] == [True]


def test_who_asks_for_slow_kernels_is_told(remembered, caplog, monkeypatch):
    remembered(45.0, 1.5)
    monkeypatch.setenv(IMITATION, "0")
    assert matrix_dtypes(precision_mode_v2="mixed_float16") == {"float16": 5}
    assert sum(f"Unset {IMITATION}" in line for line in caplog.messages) == 1


def test_a_measurement_is_kept_and_a_broken_file_replaced(remembered, tmp_path):
    place = tmp_path / "npu_bridge" / "float16_kernels.json"
    place.parent.mkdir()
    for broken in ("no JSON", "[]", '{"a": ["x", 1]}'):
        place.write_text(broken)
        kernels.float16_speed.cache_clear()
        measured = kernels.float16_speed()
        assert min(measured) > 0
        assert list(json.loads(place.read_text()).values()) == [list(measured)]
    kernels.float16_speed.cache_clear()
    assert kernels.float16_speed() == measured


def test_initial_values_that_operators_draw(monkeypatch):
    """Sorting once is not enough here: the pass that sorts also takes operators out, and others into their place."""
    monkeypatch.setenv(IMITATION, "1")
    with tf.Graph().as_default() as graph:
        value = tf.ones([2, 8, 8, 4])
        for number in range(4):
            kernel = tf1.random_normal_initializer(stddev=0.1, seed=number)
            value = tf.nn.conv2d(
                value, tf1.get_variable(f"kernel{number}", [3, 3, 4, 4], initializer=kernel), 1, "SAME"
            )
            slope = tf1.get_variable(f"slope{number}", [4])
            value = tf.nn.relu(value) + slope * (value - abs(value)) * 0.5
        rate = tf1.train.exponential_decay(0.01, tf1.train.get_or_create_global_step(), 500, 0.9)
        train_op = tf1.train.AdamOptimizer(rate).minimize(loss := tf.reduce_mean(tf.square(value - 1)))
        with session_of(graph, precision_of(precision_mode_v2="mixed_float16")) as session:
            session.run(tf1.global_variables_initializer())
            first, second = (session.run([loss, train_op])[0] for _ in range(2))
    assert second < first
