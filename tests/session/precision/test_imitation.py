"""A low dtype that float32 operators imitate, in sessions and functions, in loops, conditions and calls."""

from __future__ import annotations

import functools

import numpy as np
import pytest
import tensorflow as tf

from npu_bridge.base.tf_internals.sessions import run_without_engines
from npu_bridge.estimator.npu.npu_scope import keep_dtype_scope
from npu_bridge.session.precision import imitation, rewriter
from npu_bridge.session.precision.functions import apply_policy_to_functions
from npu_bridge.session.precision.live_session import attach_precision
from npu_bridge.session.precision.lowering import find_lowered_ops
from npu_bridge.session.precision.rewriter import IMITATION
from tests.session.precision.small_models import (
    Dense,
    classic_loops,
    kernels_of,
    nodes_of_step,
    precision_of,
    session_of,
    started,
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


@tf.function
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


@pytest.mark.parametrize(
    "model, mode",
    [
        ("loop", "mixed_float16"),
        ("loop in functions", "fp16"),
        ("calls", "mixed_float16"),
        ("convolution", "cube_fp16in_fp32out"),
    ],
)
def test_imitated_float16_trains(model, mode, monkeypatch):
    monkeypatch.setenv(IMITATION, "1")
    with classic_loops(model not in ("loop in functions", "calls")):
        build = {"convolution": convolutional, "calls": conditional}.get(model, recurrent)
        rounded, exact = (losses_of(build, name) for name in (mode, "origin"))
    assert rounded != exact
    np.testing.assert_allclose(rounded, exact, rtol=2e-2)


def matrix_kernels(**keys):
    return kernels_of(nodes_of_step(precision_of(**keys)))


def test_float16_is_imitated_and_that_is_said(monkeypatch, caplog):
    monkeypatch.delenv(IMITATION)
    caplog.set_level("INFO")
    assert matrix_kernels(precision_mode_v2="mixed_float16") == {"float32": 5}
    assert (
        sum("float32 operators on values rounded to float16 imitate float16" in line for line in caplog.messages) == 1
    )


def test_who_asks_for_slow_kernels_is_told(caplog, monkeypatch):
    monkeypatch.setenv(IMITATION, "0")
    assert matrix_kernels(precision_mode_v2="mixed_float16") == {"float16": 5}
    assert sum(f"Unset {IMITATION}" in line for line in caplog.messages) == 1


def test_initial_values_that_operators_draw(monkeypatch):
    """Sorting once is not enough here: the pass that sorts also takes operators out, and others into their place."""
    monkeypatch.setenv(IMITATION, "1")
    with tf.Graph().as_default() as graph:
        tf1.set_random_seed(1)
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


def test_runs_with_a_loop_that_go_past_the_precision(monkeypatch):
    """A training with a loop of TensorFlow 1, where nothing leaves loops out yet."""
    monkeypatch.setenv(IMITATION, "1")
    monkeypatch.setenv("TF_AUTO_MIXED_PRECISION_GRAPH_REWRITE_CLEARLIST_REMOVE", "")
    precision, config = precision_of(precision_mode="allow_mix_precision"), tf1.ConfigProto()
    precision.prepare(config)
    with tf.Graph().as_default(), classic_loops():
        outputs, _ = tf1.nn.dynamic_rnn(tf1.nn.rnn_cell.LSTMCell(16), tf.constant(BATCH), dtype=tf.float32)
        train = tf1.train.AdamOptimizer().minimize(tf.reduce_sum(outputs**2))
        with tf1.Session(config=config) as session:
            attach_precision(session, precision)
            session.run(tf1.global_variables_initializer())
            session.run(train)
            assert np.isfinite(run_without_engines(session, [outputs])[0]).all()


def perceptron(weights):
    hidden = tf.nn.relu(tf.matmul(tf.constant(BATCH[:, 0]), weights) + 1.0)
    with keep_dtype_scope():
        hidden = tf.matmul(hidden, weights)
    return tf.matmul(hidden, weights, transpose_b=True)


def by_calls(weights):
    return called(called(tf.constant(BATCH[:, 0]), weights), weights)


def outputs_and_gradient(build, weights):
    """Values that a function returns, and those of a gradient, as they are behind the last operator."""
    outputs = build(weights)
    gradient = tf.gradients(tf.reduce_sum(outputs * outputs), weights)[0]
    return tf.identity(outputs), tf.identity(gradient)


@pytest.mark.parametrize(
    "build, mode",
    [
        *((build, "mixed_bfloat16") for build in (perceptron, recurrent, conditional, by_calls)),
        (recurrent, "cube_fp16in_fp32out"),
        (by_calls, "cube_fp16in_fp32out"),
        (recurrent, "origin"),
    ],
)
def test_functions_compute_what_sessions_do(build, mode, monkeypatch):
    """In functions, loops and conditions are functions; in the session they are those of TensorFlow 1."""
    monkeypatch.setattr(rewriter, "can_lower", lambda dtype: False)
    values = np.random.RandomState(4).randn(16, 16).astype(np.float32) / 4
    function = tf.function(functools.partial(outputs_and_gradient, build))
    precision = precision_of(precision_mode_v2=mode)
    with apply_policy_to_functions(precision, precision.configured):
        in_function = [value.numpy() for value in function(tf.constant(values))]
    exact = [value.numpy() for value in function(tf.constant(values))]
    with tf.Graph().as_default() as graph, classic_loops():
        weights = tf1.placeholder(tf.float32, [16, 16])
        asked = outputs_and_gradient(build, weights)
        with session_of(graph, precision_of(precision_mode_v2=mode)) as session:
            in_session = session.run(asked, {weights: values})
    for ours, theirs, original in zip(in_function, in_session, exact):
        if (
            build is recurrent and mode == "mixed_bfloat16"
        ):  # a function is judged by itself, a loop with its neighbours
            np.testing.assert_allclose(ours, theirs, atol=0.01 * np.abs(theirs).max())
        else:
            np.testing.assert_array_equal(ours, theirs)
        assert np.array_equal(ours, original) == (mode == "origin")


def test_operators_that_are_made_in_each_step_are_not_judged_with_the_whole_graph(monkeypatch):
    monkeypatch.setattr(rewriter, "can_lower", lambda dtype: False)
    judged = []
    monkeypatch.setattr(
        imitation, "find_lowered_ops", lambda *arguments: judged.append(1) or find_lowered_ops(*arguments)
    )
    model = Dense()
    with started(model, precision_of(precision_mode_v2="mixed_bfloat16")) as session:
        session.run(model.train_op, model.batch(0))
        assert judged == [1]
        with model.graph.as_default():
            for value in (1.0, 2.0):
                session.run(tf1.assign(model.bias, [value] * 16))
            assert judged == [1]
            again = tf.identity(tf.matmul(model.x, model.hidden))
        assert len(session.run(again, model.batch(0))) == 8
        assert judged == [1, 1]
