"""Ranks meet in their transfers whatever name scopes they build them in; if they cannot meet, an error says so."""

from __future__ import annotations

from unittest import mock

import numpy as np
import pytest
import tensorflow as tf

from npu_bridge import collective
from npu_bridge.base import environment
from npu_bridge.collective import wire_names
from npu_bridge.hccl import hccl_ops
from tests.goldens.two_layers import in_graph
from tests.rank_pool import on_each_rank
from tests.ranks.ways import RATE, TRAINERS, started_session, tells_disagreement

tf1 = tf.compat.v1
# TensorFlow's collectives refuse to share slots in a TF 1 graph, and need loops with equal scopes (docs/install.md).
IS_HOROVOD = environment.collective_engine() != "tensorflow"
TRAINERS_HERE = [trainer for trainer in TRAINERS if IS_HOROVOD or trainer != "sharded"]


def _trained(trainer, value):
    """Three variables after a step from 1 with this gradient, as one op."""
    names = [f"{letter}_{trainer}".replace(" ", "_") for letter in "abc"]
    variables = [tf1.get_variable(name, [2], initializer=tf1.ones_initializer()) for name in names]
    if trainer == "in place":
        variables = [tf.Variable(tf.ones([2]), name=name) for name in names]  # whose names hold the rank's scope
    loss = tf.add_n(list(map(tf.reduce_sum, variables))) * value
    with tf.control_dependencies([TRAINERS[trainer](loss, variables)]):
        return tf.stack([variable.read_value() for variable in variables])


@pytest.mark.horovod("TensorFlow's own collectives have no such functions")
@on_each_rank(2, gives=(3, list(range(10))))
def test_functions_of_eager_transfers_do_not_add_up():
    """Returns how many functions of eager transfers are kept after five, and the values that arrived."""
    from npu_bridge.collective.engines import horovod_ranks

    horovod_ranks._FUNCTIONS.clear()
    ranks, few = collective.current(), mock.patch.object(horovod_ranks, "_MOST_FUNCTIONS", 3)
    with wire_names.use_label("training_of_this_test."), few:
        values = [int(ranks.broadcast(tf.constant(number + ranks.rank), 0, f"n{number % 5}")) for number in range(10)]
    return len(horovod_ranks._FUNCTIONS), values


@pytest.mark.few_fast(["2"], "three ranks compare like two")
@pytest.mark.parametrize("size", [2, 3])
@on_each_rank("size")
@in_graph
def test_scopes_may_differ_between_ranks(size):
    """Transfers everything in scopes that are named, nested and repeated after the rank."""
    ranks = collective.current()
    value = tf.constant(1.0 + ranks.rank)
    outer = tf.name_scope(f"rank_{ranks.rank}")
    with outer, tf.name_scope("deep" if ranks.rank else "x"):
        tf.constant(0.0, name="hccl_first2_0" if ranks.rank else "other")
        results = {
            "sum": hccl_ops.allreduce(value, "sum"),
            "max": hccl_ops.allreduce(value, "max"),
            "gathered": hccl_ops.allgather(value[None], ranks.size),
            "scattered": hccl_ops.reduce_scatter(tf.fill([ranks.size], value), "sum", ranks.size),
            "broadcast": hccl_ops.broadcast([value], ranks.size - 1)[0],
            "gradient": tf.gradients(hccl_ops.allreduce(value, "sum") * value, value)[0],
            "in a branch": tf.cond(value > 0.0, lambda: hccl_ops.allreduce(value, "sum"), lambda: value),
            **{trainer: _trained(trainer, value) for trainer in TRAINERS_HERE},
        }
        if IS_HOROVOD:
            results["in a loop"] = tf.while_loop(
                lambda count, _: count < 2,
                lambda count, total: (count + 1, total + hccl_ops.allreduce(value + 0.0 * total, "sum")),
                (0, 0.0),
            )[1]
    with started_session() as session:
        results = session.run(results)
    total = sum(range(1, size + 1))
    assert results["sum"] == results["in a branch"] == total
    assert results.get("in a loop", 2 * total) == 2 * total
    assert results["max"] == results["broadcast"] == size
    assert results["gathered"].tolist() == list(range(1, size + 1)) and results["scattered"] == [total]
    assert results["gradient"] == total + total  # by the product's other factor, and summed over the ranks
    for trainer in TRAINERS_HERE:
        np.testing.assert_array_equal(results[trainer], np.full((3, 2), 1 - RATE * total / size), trainer)


# Twice the total, summed over two ranks, times twice the value.
@on_each_rank(2, by_rank=[4 * 25.0 * 2 * 3, 4 * 25.0 * 2 * 4])
@in_graph
def test_a_sum_may_be_differentiated_after_a_message_from_rank_to_rank():
    rank = collective.current().rank
    value = tf.constant(3.0 + rank)
    message = hccl_ops.send(value, 7, 1) if rank == 0 else hccl_ops.receive([], tf.float32, 7, 0)
    total = hccl_ops.allreduce(value * value, "sum")
    with tf1.Session() as session:
        gradient, _ = session.run([tf.gradients(total * total, value)[0], message])
    return float(gradient)


@on_each_rank(2, gives=[[2.0, 2.0]] * 3)
def test_functions_may_be_traced_in_other_scopes_and_more_often():
    """One rank alone retraces a function that all-reduces, for other shapes."""
    ranks = collective.current()

    @tf.function
    def summed(value):
        with tf.name_scope(f"rank_{ranks.rank}"):
            return hccl_ops.allreduce(value[:2], "sum")

    lengths = [2, 2, 2] if ranks.rank == 0 else [2, 3, 4]
    return [summed(tf.ones([length])).numpy().tolist() for length in lengths]


# What rank 1 builds otherwise, and the message about it.
DIFFERENCES = {
    "number": (
        lambda value: [hccl_ops.allreduce(value, "sum")],
        "Expected 2 collectives, with allgather of float32 of shape (2,) at position 1, as on rank 0; got 1, with "
        "nothing",
    ),
    "more": (
        lambda value: [*_usual(value), hccl_ops.broadcast([value], 0)[0]],
        "Expected 2 collectives, with nothing at position 2, as on rank 0; got 3, with broadcast from 0 of float32",
    ),
    "order": (
        lambda value: _usual(value, reverse=True),
        "Expected allreduce with 'sum' of float32 of shape (2,) at position 0 as on rank 0; got allgather of float32",
    ),
    "dtype": (lambda value: _usual(tf.cast(value, tf.float64)), "got allreduce with 'sum' of float64 of shape (2,)"),
    "shape": (
        lambda value: _usual(tf.ones([3])),
        "of float32 of shape (2,) at position 0 as on rank 0; got allreduce with 'sum' of float32 of shape (3,)",
    ),
    "reduction": (
        lambda value: [hccl_ops.allreduce(value, "max"), _usual(value)[1]],
        "got allreduce with 'max' of float32 of shape (2,)",
    ),
}


def _usual(value, reverse=False):
    builds = [
        lambda: hccl_ops.allreduce(value, "sum"),
        lambda: hccl_ops.allgather(value, collective.current().size),
    ]
    return [build() for build in (reversed(builds) if reverse else builds)]


@tells_disagreement
def builds_otherwise(case):
    """Returns, on a rank, the refusal if rank 1 builds something else."""
    build = DIFFERENCES[case][0] if collective.current().rank == 1 else _usual
    with tf.Graph().as_default(), tf1.Session() as session:
        session.run(build(tf.ones([2])))


@on_each_rank(2)
def test_every_difference_of_collectives_is_said_on_both_ranks_before_anything_runs():
    for case, (_, expected) in DIFFERENCES.items():
        sentence = builds_otherwise(case)
        assert sentence, case
        assert sentence.startswith("hccl_ops among ranks 0, 1: rank 1 and rank 0 ")
        assert expected in sentence, case
        assert sentence.endswith("Build the same collectives in the same order on every rank.")


@on_each_rank(2, gives=([2.0, 2.0], [5.0, 6.0, 5.0, 6.0]))
@in_graph
def test_a_graph_may_grow_between_its_runs():
    """Each collective is built when the one before has run; fed values cut a graph in two."""
    value = tf1.placeholder_with_default(tf.ones([2]), [None])
    with tf1.Session() as session:
        first = session.run(hccl_ops.allreduce(value, "sum"))
        session.run(value)
        second = session.run(hccl_ops.allgather(value, collective.current().size), {value: [5.0, 6.0]})
    return first.tolist(), second.tolist()
