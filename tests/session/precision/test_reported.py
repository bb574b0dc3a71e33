"""The reported precision is that of the step, also where the lists of mixed precision have none of its operators."""

from __future__ import annotations

import numpy as np
import pytest
import tensorflow as tf

from npu_bridge.estimator.npu.npu_loss_scale_manager import FixedLossScaleManager
from npu_bridge.estimator.npu.npu_optimizer import NPUOptimizer
from npu_bridge.session.precision import modes, policy_of_last_step
from npu_bridge.session.precision.functions import apply_precision_to_model
from npu_bridge.session.precision.rewriter import IMITATION
from tests.session.precision.small_models import Dense, precision_of, session_of, started

tf1 = tf.compat.v1


@pytest.mark.parametrize("imitates", ["0", "1"])
def test_a_graph_without_operators_of_the_lists_is_said_to_be_in_float32(imitates, monkeypatch, caplog):
    monkeypatch.setenv(IMITATION, imitates)
    graph = tf.Graph()
    with graph.as_default():
        weight = tf.compat.v1.get_variable("weight", [3], initializer=tf.compat.v1.ones_initializer())
        train_op = tf.compat.v1.train.GradientDescentOptimizer(0.1).minimize(tf.reduce_sum(tf.exp(weight)))
        init = tf.compat.v1.global_variables_initializer()
    with session_of(graph, precision_of(precision_mode_v2="mixed_float16")) as session:
        session.run(init)
        session.run(train_op)
        assert policy_of_last_step(session) == modes.ORIGINAL
    assert "float16 was asked for, and none of the" in caplog.text
    assert "small gradients become zero" not in caplog.text


@pytest.mark.parametrize("imitates", ["0", "1"])
@pytest.mark.parametrize(
    ("layer", "is_lowered"), [("Dense", True), ("compiled Dense", False), ("LSTM", True), ("PReLU", False)]
)
def test_a_fit_that_lowers_nothing_is_said_to_be_in_float32(layer, is_lowered, imitates, monkeypatch, caplog):
    monkeypatch.setenv(IMITATION, imitates)
    made = {"LSTM": tf.keras.layers.LSTM(1), "PReLU": tf.keras.layers.PReLU()}.get(layer, tf.keras.layers.Dense(1))
    model = tf.keras.Sequential([made])
    model.compile("sgd", "mse", jit_compile="compiled" in layer)
    precision = precision_of(precision_mode_v2="mixed_float16")
    apply_precision_to_model(model, precision)
    model.fit(np.ones([4, 4, 1]), np.ones([4, 1]), verbose=0)
    assert precision.has_no_effect is not is_lowered
    assert ("float16 was asked for, and none of the" in caplog.text) is not is_lowered


@pytest.mark.parametrize(
    "mode, is_scaled, is_said", [("mixed_float16", 0, 1), ("mixed_float16", 1, 0), ("origin", 0, 0)]
)
def test_float16_without_a_loss_scale_is_said_once(mode, is_scaled, is_said, caplog):
    manager = FixedLossScaleManager(128.0)
    own = (lambda: NPUOptimizer(tf1.train.AdamOptimizer(), manager, is_loss_scale=True)) if is_scaled else None
    model = Dense(own) if own else Dense()
    with started(model, precision_of(precision_mode_v2=mode)) as session:
        session.run(model.loss, model.batch(0))
        assert "small gradients" not in caplog.text  # nothing is trained yet
        for _ in range(2):
            session.run(model.train_op, model.batch(0))
    assert caplog.text.count("computes in float16, where small gradients become zero") == is_said


def test_keras_in_a_graph_is_told_of_a_missing_loss_scale_once(caplog):
    with tf.Graph().as_default() as graph:
        session = session_of(graph, precision_of(precision_mode_v2="mixed_float16"))
        tf1.keras.backend.set_session(session)
        model = tf.keras.Sequential([tf.keras.layers.Dense(1, input_shape=(4,))])
        model.compile("sgd", "mse")
        model.evaluate(np.ones([4, 4]), np.ones([4, 1]), verbose=0)
        assert "small gradients" not in caplog.text  # nothing is trained yet
        model.fit(np.ones([4, 4]), np.ones([4, 1]), epochs=2, verbose=0)
    tf1.keras.backend.set_session(None)
    assert caplog.text.count("got none. Write npu_keras_optimizer(optimizer, ") == 1


def test_a_graph_that_is_lowered_is_said_to_be(caplog):
    model = Dense()
    with started(model, precision_of(precision_mode_v2="mixed_float16")) as session:
        assert policy_of_last_step(session) is None
        session.run(model.train_op, model.batch(0))
        session.run(model.init)
        assert policy_of_last_step(session).low_dtype == "float16"
    assert "was asked for" not in caplog.text


def test_a_session_whose_settings_keep_the_dtypes_is_said_to_be_in_float32(monkeypatch, caplog):
    monkeypatch.setenv(IMITATION, "0")
    model, config = Dense(), tf1.ConfigProto()
    config.graph_options.rewrite_options.disable_meta_optimizer = True
    with session_of(model.graph, precision_of(precision_mode_v2="mixed_float16"), config) as session:
        session.run(model.init)
        session.run(model.train_op, model.batch(0))
        assert policy_of_last_step(session) == modes.ORIGINAL
    assert "nothing will run in" in caplog.text
