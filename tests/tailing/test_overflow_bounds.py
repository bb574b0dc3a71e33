"""Claims that checks of reduced gradients are certain are true, whatever the other ranks have."""

from __future__ import annotations

import numpy as np
import pytest
import tensorflow as tf
from hypothesis import given, settings
from hypothesis import strategies as st

from npu_bridge.graph.index import GraphIndex
from npu_bridge.tailing.overflow_bounds import OverflowBounds, UnsupportedCheckError
from npu_bridge.tailing.transfers import Transfer

tf1 = tf.compat.v1
RANKS = 8
MAGNITUDES = [0.0, 1e-38, 1.0, 1e4, 7e4, 1e18, 1e20, 5e37, 1e38, 3e38, float("inf"), float("nan")]


def all_finite(values):
    return tf.reduce_all(tf.math.is_finite(values))


CHECKS = {
    "finite": lambda grad: all_finite(grad),
    "unscaled": lambda grad: all_finite(grad * tf.constant(1 / 1024)),
    "enlarged": lambda grad: all_finite(grad * tf.constant(1e15) * tf.constant(1e15)),
    "divided": lambda grad: all_finite(grad / tf.constant(1e-6)),
    "norm": lambda grad: tf.math.is_finite(tf.add_n([tf.nn.l2_loss(grad), tf.nn.l2_loss(-grad)])),
    "norm in one order": lambda grad: tf.math.is_finite(
        tf.reduce_sum(tf.stack([tf.nn.l2_loss(grad), tf.nn.l2_loss(-grad), tf.nn.l2_loss(grad[:2])]))
    ),
    "stacked, the larger last": lambda grad: all_finite(tf.stack([grad, tf.square(grad) * tf.constant(1e2)])),
    "enlarged total": lambda grad: tf.math.is_finite(tf.reduce_sum(grad) * tf.constant(1e10) * tf.constant(2e9)),
    "joined": lambda grad: all_finite(tf.concat([grad, tf.abs(grad)], axis=0)),
    "half": lambda grad: all_finite(tf.cast(tf.cast(grad, tf.float16), tf.float32)),
    "no nan, no inf": lambda grad: tf.logical_not(
        tf.reduce_any(tf.logical_or(tf.math.is_nan(grad), tf.math.is_inf(grad)))
    ),
    "stacked": lambda grad: tf.reduce_all(tf.stack([all_finite(grad), all_finite(tf.square(grad))])),
    "sum": lambda grad: all_finite(tf.reshape(grad + grad, [-1])),
    "rows": lambda grad: all_finite(tf.math.unsorted_segment_sum(grad, [0, 1, 0, 1], 2)),
    "total": lambda grad: tf.math.is_finite(tf.reduce_sum(grad)),
    "product": lambda grad: all_finite(grad[:2] * grad[2:]),
    "part": lambda grad: all_finite(tf.split(grad, [1, 3])[1][:2]),
}


class Exchange:
    """A graph in which an identity stands where a transfer would be: its input is local, its output is fed."""

    def __init__(self, check):
        self.graph = tf.Graph()
        with self.graph.as_default():
            self.local = tf1.placeholder(tf.float32, [4])
            arrived = tf.raw_ops.Snapshot(input=self.local)
            self.arrived, self.outcome = arrived, check(arrived)
            transfer = Transfer(arrived.op, arrived.op, ((0, 0),), 1.0, tf.float32)
            dependent = GraphIndex(self.graph).descendants([arrived.op])
            self.certain = OverflowBounds({arrived.op.name: transfer}, dependent, RANKS).is_surely_true(self.outcome)
            self.session = tf1.Session()

    def is_certain(self, local):
        return bool(self.session.run(self.certain, {self.local: local}))

    def passes(self, reduced):
        return bool(self.session.run(self.outcome, {self.local: reduced, self.arrived: reduced}))


@pytest.fixture(scope="module")
def exchanges():
    return {name: Exchange(check) for name, check in CHECKS.items()}


@settings(max_examples=100, deadline=None)
@given(name=st.sampled_from(sorted(CHECKS)), data=st.data())
def test_a_check_that_is_certain_on_every_rank_passes(exchanges, name, data):
    # Few sizes at a time: among many, one that is never certain would nearly always decide.
    sizes = data.draw(st.lists(st.sampled_from(MAGNITUDES), min_size=1, max_size=2))
    element = st.tuples(st.sampled_from(sizes), st.sampled_from([-1.0, 1.0])).map(np.prod)
    gradients = np.float32([data.draw(st.lists(element, min_size=4, max_size=4)) for _ in range(RANKS)])
    with np.errstate(all="ignore"):
        total = gradients.sum(axis=0, dtype=np.float32)
        reduced = [total, total / np.float32(RANKS)]
    if all(exchanges[name].is_certain(gradient) for gradient in gradients):
        assert all(exchanges[name].passes(values) for values in reduced)


@pytest.mark.parametrize("size", MAGNITUDES)
@pytest.mark.parametrize("name", CHECKS)
def test_equal_gradients_of_every_size(exchanges, name, size):
    local = np.full(4, size, np.float32)
    with np.errstate(all="ignore"):
        total = local * np.float32(RANKS)
        mean = total / np.float32(RANKS)
    if exchanges[name].is_certain(local):
        assert exchanges[name].passes(total) and exchanges[name].passes(mean)


@pytest.mark.parametrize("name", CHECKS)
def test_ordinary_gradients_are_certain(exchanges, name):
    assert exchanges[name].is_certain(np.float32([1.0, -2.0, 0.5, 100.0]))


@pytest.mark.parametrize("name", CHECKS)
@pytest.mark.parametrize("bad", [np.nan, np.inf, 3e38])
def test_what_is_not_finite_or_near_the_end_is_not_certain(exchanges, name, bad):
    assert not exchanges[name].is_certain(np.float32([1.0, bad, 0.5, 1.0]))


def test_the_factors_of_a_product_can_be_largest_on_different_ranks(exchanges):
    own = np.float32([[1e30, 0.0, 1.0, 0.0], [1.0, 0.0, 1e30, 0.0]])
    assert not all(map(exchanges["product"].is_certain, own))


def test_a_scalar_counts_for_every_element_to_which_it_is_added():
    def total(grad):
        shifted = tf.concat([grad] * 64, axis=0) + tf.constant(1e19)
        return tf.math.is_finite(tf.reduce_sum(shifted) * tf.constant(2e17))

    exchange = Exchange(total)
    assert not exchange.passes(np.zeros(4, np.float32)) and not exchange.is_certain(np.zeros(4, np.float32))


@pytest.mark.parametrize("adds_up", [False, True])
def test_numbers_that_only_move_may_fill_their_dtype(graph, adds_up):
    local = tf.constant([6e4, 6e4, -6e4, 1.0], tf.float16)
    arrived = tf.raw_ops.Snapshot(input=local)
    outcome = all_finite(tf.reshape(arrived, [2, 2]))
    transfer = Transfer(arrived.op, arrived.op, ((0, 0),), 1.0, tf.float16, adds_up)
    dependent = GraphIndex(graph).descendants([arrived.op])
    certain = OverflowBounds({arrived.op.name: transfer}, dependent, RANKS).is_surely_true(outcome)
    with tf1.Session() as session:
        assert session.run(certain) == (not adds_up)


@pytest.mark.parametrize(
    "check",
    [
        lambda grad: tf.reduce_sum(grad) > 0.0,
        lambda grad: all_finite(tf.math.exp(grad)),
        lambda grad: all_finite(1.0 / grad),
        lambda grad: all_finite(grad + tf.ones([3, 4])),
    ],
)
def test_other_checks_are_refused_by_name(check):
    with pytest.raises(UnsupportedCheckError, match=r"\(\w+\)"):
        Exchange(check)


def test_a_sum_of_many_terms_is_bounded_by_all_of_them():
    """Of 4,096 equal terms, the sum is 64 times their norm."""
    with tf.Graph().as_default() as graph, tf1.Session() as session:
        local = tf1.placeholder(tf.float32, [4096])
        arrived = tf.raw_ops.Snapshot(input=local)
        total = tf.reduce_sum(arrived)
        transfer = Transfer(arrived.op, arrived.op, ((0, 0),), 1.0, tf.float32)
        bounds = OverflowBounds({arrived.op.name: transfer}, GraphIndex(graph).descendants([arrived.op]), 1)
        assert session.run(bounds.norm_bound(total), {local: np.ones(4096)}) >= 4095
