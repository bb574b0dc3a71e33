"""Steps that overlap in a loop on ranks: the bits of steps one by one, and the order in which gradients travel."""

from __future__ import annotations

from unittest import mock

import numpy as np
import pytest
import tensorflow as tf

from npu_bridge import collective
from npu_bridge.collective import fragments
from npu_bridge.estimator.npu import util
from npu_bridge.estimator.npu.npu_loss_scale_manager import ExponentialUpdateLossScaleManager
from npu_bridge.estimator.npu.npu_optimizer import NPUOptimizer
from npu_bridge.options import of_graph, read_session_config
from npu_bridge.options.reading import with_entry
from npu_bridge.rewrite import put_in_crossing_loop
from tests.rewrite.waiting import gradient_transfers, nodes_of_graph, waiting_for
from tests.training import OPTIMIZERS, assert_same_bits, in_graph

tf1 = tf.compat.v1
pytestmark = pytest.mark.ranks(2)
LAYERS, WIDTH = 8, 16
STEPS, LOOP = 50, 25
BATCHES, OVERFLOWING = 12, 7  # on rank 1 alone
# One gradient in each transfer.
_SMALL_FLIGHTS = mock.patch.object(fragments, "_FLIGHT_BYTES_PER_RANK", 1)


def loss_of_layers(has_seeded_noise=False):
    """A chain of layers on this rank's batches, of which one overflows on rank 1."""
    rank = collective.current().rank
    rows = np.random.RandomState(rank).randn(BATCHES, 4, WIDTH).astype("f")
    if rank == 1:
        rows[OVERFLOWING, 0, 0] = np.inf
    values = tf1.data.make_one_shot_iterator(tf.data.Dataset.from_tensor_slices(rows).repeat()).get_next()
    if has_seeded_noise:
        values += tf.random.uniform([WIDTH], seed=2)
    for layer in range(LAYERS):
        initializer = tf1.random_normal_initializer(stddev=WIDTH**-0.5, seed=layer)
        weight = tf1.get_variable(f"layer_{layer}", [WIDTH, WIDTH], initializer=initializer)
        values = tf.nn.leaky_relu(tf.matmul(values, weight))
    return tf.reduce_mean(tf.square(values))


def train_op_of(optimizer_name, is_tailing=True, has_seeded_noise=False):
    tf1.set_random_seed(3)
    loss = loss_of_layers(has_seeded_noise)
    manager = ExponentialUpdateLossScaleManager(1024, 3, 1, 2, 0.5)
    optimizer = NPUOptimizer(OPTIMIZERS[optimizer_name](), manager, True, True, is_tailing)
    return optimizer.minimize(loss, tf1.train.get_or_create_global_step())


@in_graph
@_SMALL_FLIGHTS
def train(overlaps, optimizer_name, is_tailing=True, noisy_rank=None):
    """On a rank: all variables after the steps, and the way in which all but the last of a run were trained."""
    values = {"overlap_loop_steps": overlaps, "iterations_per_loop": LOOP, "is_tailing_optimization": is_tailing}
    of_graph.publish(read_session_config(with_entry(None, values)))
    train_op = train_op_of(optimizer_name, is_tailing, collective.current().rank == noisy_rank)
    with tf1.Session() as session:
        session.run(tf1.global_variables_initializer())
        step = util.set_iteration_per_loop(session, train_op, LOOP)
        for _ in range(STEPS // LOOP):
            session.run(step)
        (way,) = session._npu_bridge_loops._earlier.values()
        return {variable.name: session.run(variable) for variable in tf1.global_variables()}, type(way).__name__


def train_both_ways(optimizer_name, is_tailing):
    """On a rank."""
    return [train(overlaps, optimizer_name, is_tailing) for overlaps in (False, True)]


@pytest.mark.parametrize(
    "optimizer_name, is_tailing", [("momentum", True), ("adam", True), ("lamb", True), ("adam", False)]
)
def test_overlapping_steps_train_the_same_bits(on_ranks, optimizer_name, is_tailing):
    for (expected, way), (actual, new_way) in on_ranks(2, train_both_ways, optimizer_name, is_tailing):
        assert (way, new_way) == ("_Prepared", "_Copied")
        assert expected["global_step:0"] == STEPS - STEPS // BATCHES
        assert_same_bits(actual, expected)


def test_steps_overlap_on_all_ranks_or_on_none(on_ranks):
    """The numbers that rank 1 draws keep it from copying its step."""
    ways = [way for _, way in on_ranks(2, train, True, "momentum", True, 1)]
    assert ways == ["_Prepared", "_Prepared"]


@in_graph
@_SMALL_FLIGHTS
def waits_between_transfers():
    """On a rank: how many transfers must wait for another one, in a step alone and in one that overlaps."""
    train_op = train_op_of("momentum")
    single = nodes_of_graph(train_op.graph)
    put_in_crossing_loop(train_op.graph, [train_op])
    looped = {name: node for name, node in nodes_of_graph(train_op.graph).items() if name.startswith("iteration_loop/")}
    return [_count_waits(single), _count_waits(looped), _layers_in_turn(looped)]


def _count_waits(nodes):
    transfers = set(gradient_transfers(nodes))
    return sum(len(transfers.intersection(waiting_for(nodes, [transfer]))) - 1 for transfer in transfers)


def _layers_in_turn(nodes):
    """The transfers by the fragment in their name, as they would go when all gradients are ready."""
    order, after = [], "iteration_loop/sending/all_ready"
    while after:
        users = [node for node in nodes.values() if after in node.data]
        merges = {node.name for node in users if node.kind == "Merge"}
        order += [name for name in gradient_transfers(nodes) if merges.intersection(nodes[name].control)]
        after = next((node.name for node in users if node.kind == "Identity"), None)
    return [int(name.split("fragment_")[1].split("_")[0]) for name in order]


def test_what_is_left_after_the_backward_pass_goes_in_the_order_of_need(on_ranks):
    for single, looped, order in on_ranks(2, waits_between_transfers):
        assert single > 0
        assert looped == 0
        assert order == sorted(range(LAYERS), reverse=True)
