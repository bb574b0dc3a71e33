"""Update rules against numpy, eagerly and in graphs, with variables of both kinds."""

from __future__ import annotations

import numpy as np
import pytest
import tensorflow as tf

from npu_bridge.estimator import npu_ops
from npu_bridge.tbe import npu_vector_ops
from tests.operators.computing import close, computed, differentiable

tf1 = tf.compat.v1
RANDOM = np.random.default_rng(11)
WEIGHT, GRADIENT, FIRST, SECOND = RANDOM.normal(size=[4, 2, 3]).astype(np.float32)
SECOND = SECOND**2
BETAS = (0.875, 0.125, 0.96875, 0.03125)  # without rounding in binary
EPSILON, RATE, DECAY = 1e-6, 0.3, 0.01
STEPS = 7


def lars(weight, gradient, decay=DECAY, rate=None, trust=0.001, epsilon=1e-5):
    norm = np.linalg.norm
    scale = trust * norm(weight) / (norm(gradient) + decay * norm(weight) + epsilon)
    if rate is not None:
        scale = np.clip(scale / rate, 0, 1)
    return (scale * (gradient + decay * weight)).astype(np.float32)


@pytest.mark.parametrize("rate, trust", [(None, 0.001), (0.5, 0.001), (1e-4, 0.5)])
def test_lars_v2(rate, trust):
    def operator(weight, gradient):
        return npu_ops.LARSV2(weight, gradient, DECAY, rate or 0.5, hyperpara=trust, use_clip=rate is not None)

    close(computed(operator, WEIGHT, GRADIENT), lars(WEIGHT, GRADIENT, rate=rate, trust=trust))


def test_lars_has_a_gradient():
    differentiable(lambda w, g: npu_ops.LARSV2(w, g, DECAY, 1.0, hyperpara=1.0), WEIGHT, GRADIENT)


def test_lars_adds_in_one_order_in_every_graph():
    with tf.Graph().as_default(), tf1.Session() as session:
        scaled = npu_ops.LARSV2(tf.random.normal([3]), tf.random.normal([3]), DECAY, 0.5)
        metadata = tf1.RunMetadata()
        session.run(scaled, options=tf1.RunOptions(output_partition_graphs=True), run_metadata=metadata)
    executed = {node.op for part in metadata.partition_graphs for node in part.node}
    assert "Sum" in executed and "AddN" not in executed


def test_lars_of_lists():
    pairs = computed(
        lambda w, g: npu_ops.LARS([w, 2 * w], [g, -g], tf.constant(DECAY), hyperpara=0.1), WEIGHT, GRADIENT
    )
    close(pairs[0], lars(WEIGHT, GRADIENT, trust=0.1))
    close(pairs[1], lars(2 * WEIGHT, -GRADIENT, trust=0.1))
    with pytest.raises(ValueError, match="LARS: .*2 weights and 1 gradients"):
        npu_ops.LARS([WEIGHT, WEIGHT], [GRADIENT], DECAY)


def after(step, *values, is_reference=False):
    """Variables after two steps in a session, and what the last one gave."""
    with tf.Graph().as_default(), tf1.Session() as session:
        variables = [tf1.Variable(value, use_resource=not is_reference) for value in values]
        op = step(*variables)
        session.run(tf1.global_variables_initializer())
        session.run(op)
        result = session.run(op)
        return session.run(variables), result


def moments(gradient, second, first):
    return BETAS[0] * first + BETAS[1] * gradient, BETAS[2] * second + BETAS[3] * gradient**2


def adam(variables, decay):
    second, first, weight = (variable.astype(np.float64) for variable in variables)
    for _ in range(2):
        first, second = moments(GRADIENT, second, first)
        weight = weight - RATE * (first / (np.sqrt(second) + EPSILON) + decay * weight)
    return second, first, weight


@pytest.mark.parametrize("is_reference", [False, True])
@pytest.mark.parametrize("decay", [None, DECAY])
def test_adam(decay, is_reference):
    def step(second, first, weight):
        inputs = (GRADIENT, second, first, weight, tf.constant(RATE))
        if decay is None:
            return npu_ops.adam_apply_one_assign(*inputs, *BETAS, EPSILON)
        return npu_ops.adam_apply_one_with_decay_assign(*inputs, *BETAS, decay, EPSILON)

    given = (SECOND, FIRST, WEIGHT)
    expected = [value.astype(np.float32) for value in adam(given, decay or 0)]
    in_graph, op_result = after(step, *given, is_reference=is_reference)
    assert op_result is None
    eagerly = [tf.Variable(value) for value in given]
    for _ in range(2):
        assert step(*eagerly) is None
    for one, other, expectation in zip(in_graph, eagerly, expected):
        close(one, expectation)
        close(other, expectation)


@pytest.mark.parametrize("do_use_weight", [0, 1])
def test_direction_of_lamb(do_use_weight):
    given = (SECOND, FIRST)

    def step(second, first):
        return npu_vector_ops.lamb_apply_optimizer_assign(
            GRADIENT, second, first, WEIGHT, *BETAS, EPSILON, STEPS, do_use_weight, DECAY
        )

    second, first = (value.astype(np.float64) for value in given)
    for _ in range(2):
        first, second = moments(GRADIENT, second, first)
    first_part = first / (1 - BETAS[0] ** STEPS) / (np.sqrt(second / (1 - BETAS[2] ** STEPS)) + EPSILON)
    direction = first_part + do_use_weight * DECAY * WEIGHT
    (second_after, first_after), results = after(step, *given)
    for actual, expected in zip(results, (direction, second, first)):
        close(actual, expected.astype(np.float32))
    close(second_after, second.astype(np.float32))
    close(first_after, first.astype(np.float32))
    eagerly = [tf.Variable(value) for value in given]
    step(*eagerly)
    close(step(*eagerly)[0], direction.astype(np.float32))


@pytest.mark.parametrize("norms, ratio", [((6.0, 2.0), 3.0), ((0.0, 2.0), 1.0), ((6.0, 0.0), 1.0)])
def test_lamb_goes_the_step(norms, ratio):
    def step(weight):
        return npu_vector_ops.lamb_apply_weight_assign(*norms, RATE, GRADIENT, weight)

    expected = (WEIGHT - 2 * ratio * RATE * GRADIENT).astype(np.float32)
    (variable,), result = after(step, WEIGHT)
    close(variable, expected)
    close(result, expected)
    eagerly = tf.Variable(WEIGHT)
    step(eagerly)
    close(step(eagerly), expected)


def test_what_is_updated_must_be_a_variable():
    for call in (
        lambda: npu_ops.adam_apply_one_assign(GRADIENT, SECOND, FIRST, WEIGHT, RATE, *BETAS, EPSILON),
        lambda: npu_vector_ops.lamb_apply_weight_assign(1.0, 1.0, RATE, GRADIENT, tf.constant(WEIGHT)),
    ):
        with pytest.raises(TypeError, match="Expected a tf.Variable; got "):
            call()
