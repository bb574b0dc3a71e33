"""Adasum of updates: each group of ranks updates by itself, with slots of its own, and what it changed is combined."""

from __future__ import annotations

import contextlib

import numpy as np
import pytest
import tensorflow as tf

from npu_bridge import collective, stages
from npu_bridge.estimator.npu.npu_helpers import npu_keras_optimizer
from npu_bridge.estimator.npu.npu_optimizer import NPUDistributedOptimizer
from tests.goldens.models import adasum_tree

tf1 = tf.compat.v1
RATE, BETA_1, BETA_2, EPSILON, STEPS = 0.1, 0.9, 0.999, 1e-3, 6
SHAPES = {"kernel": (3, 2), "bias": (2,)}
ADAMS = {
    "TF 1": lambda: tf1.train.AdamOptimizer(RATE, epsilon=EPSILON),
    "legacy": lambda: tf.keras.optimizers.legacy.Adam(RATE, epsilon=EPSILON),
    "current": lambda: tf.keras.optimizers.Adam(RATE, epsilon=EPSILON),
}


def gradients_of(rank):
    random = np.random.RandomState(rank)
    return [{name: random.randn(*shape).astype(np.float32) for name, shape in SHAPES.items()} for _ in range(STEPS)]


def adam_in_numpy(rank_count, averaged_ranks):
    """The values of all ranks after training, and the first moments of each group."""
    values = {name: np.ones(shape) for name, shape in SHAPES.items()}
    fed = [gradients_of(rank) for rank in range(rank_count)]
    starts = range(0, rank_count, averaged_ranks)
    moments = [{name: [np.zeros(shape), np.zeros(shape)] for name, shape in SHAPES.items()} for _ in starts]
    for step in range(STEPS):
        rate = RATE * np.sqrt(1 - BETA_2 ** (step + 1)) / (1 - BETA_1 ** (step + 1))
        for name in SHAPES:
            deltas = []
            for start, of_group in zip(starts, moments):
                grad = np.mean([fed[rank][step][name] for rank in range(start, start + averaged_ranks)], axis=0)
                first, second = of_group[name]
                first += (1 - BETA_1) * (grad - first)
                second += (1 - BETA_2) * (grad**2 - second)
                deltas.append(rate * first / (np.sqrt(second) + EPSILON))
            values[name] = values[name] - adasum_tree(deltas)
    return values, [{name: first for name, (first, _) in of_group.items()} for of_group in moments]


def trained_by_adam(family, averaged_ranks):
    """On a rank: the same, its own moments."""
    fed, added = gradients_of(collective.current().rank), [stages.Adasum(averaged_ranks, on="weights")]
    name = f"{family.replace(' ', '')}_{averaged_ranks}"
    with tf.Graph().as_default() if family == "TF 1" else contextlib.nullcontext():
        variables = {key: tf.Variable(tf.ones(shape), name=f"{name}_{key}") for key, shape in SHAPES.items()}
        inner, trained = ADAMS[family](), list(variables.values())
        if family == "TF 1":
            grads = {key: tf1.placeholder(tf.float32, shape) for key, shape in SHAPES.items()}
            optimizer = NPUDistributedOptimizer(inner, name=name, stages=added)
            train_op = optimizer.minimize(tf.add_n([tf.reduce_sum(variables[key] * grads[key]) for key in SHAPES]))
            with tf1.Session() as session:
                session.run(tf1.global_variables_initializer())
                for step in fed:
                    session.run(train_op, {grads[key]: value for key, value in step.items()})
                return session.run([variables, {key: inner.get_slot(variables[key], "m") for key in SHAPES}])
        optimizer = npu_keras_optimizer(inner, is_distributed=True, stages=added)

        @tf.function(autograph=False)
        def minimize(grads):
            optimizer.minimize(
                lambda: tf.add_n([tf.reduce_sum(variables[key] * grads[key]) for key in SHAPES]), trained
            )

        for step in fed:
            minimize({key: tf.constant(value) for key, value in step.items()})
        own = inner.variables() if family == "legacy" else inner.variables
        firsts = [variable for variable in own if "/m" in variable.name]  # "Adam/m/kernel:0", or "Adam/kernel/m:0"
        moments = {key: next(first for first in firsts if key in first.name) for key in SHAPES}
        return tuple({key: value.numpy() for key, value in of.items()} for of in (variables, moments))


def trained_by_adams(families, averaged_ranks):
    return [(family, count, *trained_by_adam(family, count)) for count in averaged_ranks for family in families]


def check_against_numpy(results):
    for of_ranks in zip(*results):
        family, averaged_ranks, values, _ = of_ranks[0]
        expected, moments = adam_in_numpy(len(results), averaged_ranks)
        for name in SHAPES:
            np.testing.assert_allclose(values[name], expected[name], rtol=2e-5, atol=2e-6, err_msg=family)
            for rank, (_, _, of_rank, own) in enumerate(of_ranks):
                assert np.array_equal(of_rank[name], values[name]), f"{family}: {name} differs between ranks"
                of_group = moments[rank // averaged_ranks][name]
                np.testing.assert_allclose(own[name], of_group, rtol=2e-5, atol=2e-6, err_msg=f"{family}, rank {rank}")


@pytest.mark.slow("a fast case has the numbers of updates")
@pytest.mark.ranks(2)
def test_every_rank_updates_with_moments_of_its_own(on_ranks):
    check_against_numpy(on_ranks(2, trained_by_adams, list(ADAMS), [1]))


@pytest.mark.slow("four ranks share two cores")
@pytest.mark.ranks(4)
def test_ranks_of_a_group_average_their_gradients_and_groups_combine_their_updates(on_ranks):
    check_against_numpy(on_ranks(4, trained_by_adams, ["TF 1"], [1, 2]))


def clipped_before_the_mean():
    """Returns, on a rank, the mean of gradients that each rank clips; the ranks have 3.0 and 0.5."""
    kernel = tf.Variable([0.0])
    added = [stages.ClipLocally(1.0), stages.Adasum(2, on="weights")]
    pipeline = stages.pipeline("clipped", is_distributed=True, stages=added)
    gradient = tf.constant([0.5 if collective.current().rank else 3.0])
    return pipeline.combine(pipeline.begin(), [(gradient, kernel)])[0][0].numpy().tolist()


@pytest.mark.ranks(2)
def test_gradients_of_a_group_of_ranks_are_clipped_before_their_mean(on_ranks):
    assert on_ranks(2, clipped_before_the_mean) == [[0.75], [0.75]]


def three_kinds_of_updates():
    """On a rank: values after updates that are the same on all ranks, or orthogonal, or too large for 16 bits."""
    rank = collective.current().rank
    grads = {
        "same": tf.constant([3.0, -1.0]),
        "orthogonal": tf.one_hot(rank, 2) * (rank + 1.0),
        "too large": tf.constant([30000.0 - 30000.0 * rank, 1.0], tf.float16),
    }
    variables = {name: tf.Variable(tf.zeros_like(grad)) for name, grad in grads.items()}
    variables["too large"].assign([-60000.0, 0.0])  # another 30000 less is no float16 any more
    pipeline = stages.pipeline("kinds", is_distributed=True, stages=[stages.Adasum(on="weights")])
    step = pipeline.begin()
    pairs = pipeline.combine(step, [(grads[name], variables[name]) for name in grads])
    pipeline.apply(step, pairs, lambda pairs: [variable.assign_sub(grad) for grad, variable in pairs][-1])
    return {name: variable.numpy().tolist() for name, variable in variables.items()}


@pytest.mark.ranks(2)
def test_updates_are_averaged_where_the_same_and_summed_where_orthogonal(on_ranks):
    for values in on_ranks(2, three_kinds_of_updates):
        assert values == {"same": [-3.0, 1.0], "orthogonal": [-1.0, -2.0], "too large": [-60000.0, -1.0]}
