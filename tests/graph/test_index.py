"""The view of a graph for passes, compared with walks written the slow way, on random graphs."""

from __future__ import annotations

import tensorflow as tf
from hypothesis import given, settings
from hypothesis import strategies as st

from npu_bridge.graph.index import GraphIndex
from npu_bridge.graph.operators import computed_ops

# Of every op, which earlier ones it reads and which it waits for.
RANDOM_GRAPHS = st.lists(st.tuples(st.lists(st.integers(0, 30), max_size=3), st.lists(st.integers(0, 30), max_size=2)))


def build(plan):
    graph = tf.Graph()
    with graph.as_default():
        made = [tf.compat.v1.placeholder(tf.float32, [])]
        for reads, waits in plan:
            with tf.control_dependencies([made[number % len(made)] for number in waits]):
                made.append(tf.add_n([made[number % len(made)] for number in reads] or [made[0]]))
    return graph, [tensor.op for tensor in made]


def reaches(op, target, through_control=False):
    before = [tensor.op for tensor in op.inputs] + (list(op.control_inputs) if through_control else [])
    return op is target or any(reaches(other, target, through_control) for other in before)


@settings(max_examples=40, deadline=None)
@given(RANDOM_GRAPHS.filter(lambda plan: len(plan) < 12), st.integers(0, 30))
def test_ancestors_and_followers_are_those_of_a_slow_walk(plan, chosen):
    graph, ops = build(plan)
    index, target = GraphIndex(graph), ops[chosen % len(ops)]
    assert index.ancestors([target]) == {op.name for op in ops if reaches(target, op)}
    assert index.descendants([target]) == {op.name for op in ops if reaches(op, target)}
    assert set(computed_ops([target])) == {op for op in ops if reaches(target, op, through_control=True)}


def test_readers_tell_the_position():
    with tf.Graph().as_default() as graph:
        one, other = tf.compat.v1.placeholder(tf.float32, []), tf.compat.v1.placeholder(tf.float32, [])
        difference = tf.raw_ops.Sub(x=other, y=one)
        square = tf.raw_ops.Mul(x=one, y=one)
    assert GraphIndex(graph).readers(one) == [(difference.op, 1), (square.op, 0), (square.op, 1)]
    assert GraphIndex(graph).readers(square) == []
