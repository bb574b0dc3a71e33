"""LAMB under its documented names: the update rule, the exclusions, and the schedule."""

from __future__ import annotations

import numpy as np
import pytest
import tensorflow as tf
from lamb import LAMBOptimizer, WarmupThenLinearDecay

from tests.goldens.two_layers import beside_addons, tfa

if tfa is not None:
    from tfa_lamb import TfaLAMBOptimizer
else:
    TfaLAMBOptimizer = None

EXCLUDED = ["LayerNorm", "layer_norm", "bias"]


def numpy_lamb(values, grads, rate, decay, adapts, beta_1=0.9, beta_2=0.999, epsilon=1e-6):
    """The rule of the paper (You et al. 2019, algorithm 2) over a list of gradients, in float64."""
    values = np.array(values, np.float64)
    first, second = np.zeros_like(values), np.zeros_like(values)
    for step, grad in enumerate(np.array(grads, np.float64), 1):
        first = beta_1 * first + (1 - beta_1) * grad
        second = beta_2 * second + (1 - beta_2) * grad**2
        update = (first / (1 - beta_1**step)) / (np.sqrt(second / (1 - beta_2**step)) + epsilon) + decay * values
        ratio = np.linalg.norm(values) / np.linalg.norm(update) if adapts else 1.0
        values = values - rate * ratio * update
    return values


@pytest.mark.parametrize("optimizer_class", [LAMBOptimizer, pytest.param(TfaLAMBOptimizer, marks=beside_addons)])
@pytest.mark.parametrize(("name", "excluded"), [("dense/kernel", False), ("LayerNorm/gamma", True), ("bias", True)])
def test_update_rule_and_exclusions(graph, name, excluded, optimizer_class):
    rng = np.random.default_rng(1)
    start, grads = rng.normal(size=4), rng.normal(size=(5, 4))
    variable = tf.compat.v1.get_variable(name, initializer=tf.constant(start, tf.float32))
    grad = tf.compat.v1.placeholder(tf.float32, [4])
    optimizer = optimizer_class(0.1, 0.01, 0.9, 0.999, 1e-6, EXCLUDED)
    train_op = optimizer.apply_gradients([(grad, variable)])
    with tf.compat.v1.Session() as session:
        session.run(tf.compat.v1.global_variables_initializer())
        for value in grads:
            session.run(train_op, {grad: value})
        result = session.run(variable)
    expected = numpy_lamb(start, grads, 0.1, 0.0 if excluded else 0.01, adapts=not excluded)
    np.testing.assert_allclose(result, expected, rtol=2e-5)


@beside_addons
def test_config_round_trip_keeps_the_exclusions():
    optimizer = TfaLAMBOptimizer(0.1, weight_decay_rate=0.02, exclude_from_weight_decay=EXCLUDED)
    copy = TfaLAMBOptimizer.from_config(optimizer.get_config())
    assert copy.get_config() == optimizer.get_config()
    assert copy.exclude_from_weight_decay == copy.exclude_from_layer_adaptation == EXCLUDED


def test_schedule_rises_and_falls():
    schedule = WarmupThenLinearDecay(1.0, warmup_steps=4, total_steps=12)
    rates = [float(schedule(step)) for step in (0, 1, 3, 4, 8, 11, 12, 20)]
    assert rates == [0.25, 0.5, 1.0, 1.0, 0.5, 0.125, 0.0, 0.0]
    assert float(WarmupThenLinearDecay(1.0, 0, 10)(0)) == 1.0


def test_schedule_survives_its_config():
    schedule = WarmupThenLinearDecay(0.5, 3, 10)
    assert WarmupThenLinearDecay.from_config(schedule.get_config()).get_config() == schedule.get_config()


def test_warm_up_longer_than_the_run_is_refused():
    with pytest.raises(ValueError, match="total_steps=10; got 10.*--num_warmup_steps"):
        WarmupThenLinearDecay(1.0, 10, 10)
