"""Every rule in every face against its numpy model."""

from __future__ import annotations

import dataclasses
import types

import numpy as np
import pytest
import tensorflow as tf

from npu_bridge.optimizers import keras, keras_legacy, rules, tf1
from tests.optimizers import numpy_models

STEPS = 50
SHAPES = ([4, 6], [5], [])
CASES = [(name, given) for name, (_, cases) in numpy_models.CASES.items() for given in cases]


def _start():
    random = np.random.RandomState(3)
    return [np.asarray(random.randn(*shape)) for shape in SHAPES]


def _gradients():
    """Gradients over eight decades."""
    random = np.random.RandomState(4)
    return [[random.randn(*shape) * 10.0 ** random.uniform(-6, 2) for shape in SHAPES] for _ in range(STEPS)]


def _expected(name, given):
    rule = getattr(rules, name)(**given)
    options = {field.name: getattr(rule, field.name) for field in dataclasses.fields(rule)}
    return numpy_models.run(numpy_models.CASES[name][0], options, _start(), _gradients())


def _trained_in_graph(make):
    with tf.Graph().as_default():
        variables = [tf.compat.v1.get_variable(f"v{i}", initializer=value) for i, value in enumerate(_start())]
        fed = [tf.compat.v1.placeholder(variable.dtype.base_dtype, variable.shape) for variable in variables]
        step = make().apply_gradients(list(zip(fed, variables)))
        with tf.compat.v1.Session() as session:
            session.run(tf.compat.v1.global_variables_initializer())
            for gradients in _gradients():
                session.run(step, dict(zip(fed, gradients)))
            return session.run(variables)


def _trained_eagerly(make):
    variables = [tf.Variable(value) for value in _start()]
    optimizer = make()

    @tf.function
    def step(gradients):
        optimizer.apply_gradients(list(zip(gradients, variables)))

    for gradients in _gradients():
        step([tf.constant(gradient) for gradient in gradients])
    return [variable.numpy() for variable in variables]


@pytest.mark.parametrize("name, given", CASES, ids=[f"{name}-{number}" for number, (name, _) in enumerate(CASES)])
def test_every_face_follows_the_formula(name, given):
    expected = _expected(name, given)
    assert not any(np.allclose(start, end) for start, end in zip(_start(), expected))
    trained = {
        "tf1": _trained_in_graph(lambda: getattr(tf1, name)(**given)),
        "keras": _trained_eagerly(lambda: getattr(keras, name)(**given)),
        "keras_legacy": _trained_eagerly(lambda: getattr(keras_legacy, name)(**given)),
    }
    for face, actual in trained.items():
        for one, other in zip(actual, expected):
            np.testing.assert_allclose(one, other, rtol=2e-6, atol=2e-6, err_msg=face)


def test_every_rule_has_a_model():
    assert {rule.__name__ for rule in rules.ALL} == set(numpy_models.CASES)


@pytest.mark.parametrize("epsilon_inside", [True, False])
def test_equal_gradients_leave_centered_rmsprop_finite(epsilon_inside):
    """Their variance is 0, and by rounding a little less."""
    rule = rules.RMSProp(centered=True, epsilon_inside=epsilon_inside)
    hypers = types.SimpleNamespace(learning_rate=1.0, rho=0.99, epsilon=1e-8)
    slots = {"rms": tf.constant(0.0099999), "mean_gradient": tf.constant(0.1)}
    amount, _ = rule.amount_to_subtract(None, tf.constant(0.1), slots, hypers, None)
    assert np.isfinite(amount)
