"""The inputs that operators need, and the operators that a run computes."""

from __future__ import annotations

import numpy as np
import pytest
import tensorflow as tf
from tensorflow.python.eager import context

from npu_bridge.graph.operators import computed_ops, list_elements, needed_ops, sources_among

tf1 = tf.compat.v1


pytestmark = pytest.mark.usefixtures("graph")


def chain():
    first = tf.constant(1.0, name="first")
    with tf.control_dependencies([tf.constant(0.0, name="before")]):
        second = tf.subtract(first, first, name="second")
    return first, second, tf.negative(second, name="third")


def test_every_operator_comes_after_those_it_needs():
    variable = tf1.get_variable("v", [2])
    loss = tf.reduce_sum(tf.square(variable))
    train_op = tf1.train.AdamOptimizer().minimize(loss, tf1.train.get_or_create_global_step())
    ops = computed_ops([train_op, loss])
    place = {op: number for number, op in enumerate(ops)}
    assert len(place) == len(ops)
    assert all(place[needed] < place[op] for op in ops for needed in needed_ops(op))


def test_what_is_fed_is_not_computed():
    _, second, third = chain()
    assert [op.name for op in computed_ops([third])] == ["first", "before", "second", "third"]
    assert [op.name for op in computed_ops([third], {second.name})] == ["third"]
    assert computed_ops([second], {second.name}) == []
    assert second.op in computed_ops([second.op], {second.name})  # who asks for the operator runs it


def test_the_body_of_a_loop_comes_last_and_whole():
    tf1.disable_control_flow_v2()
    try:
        result = tf1.while_loop(lambda i, x: i < 3, lambda i, x: (i + 1, tf.exp(x, name="body")), (0, tf.constant(1.0)))
    finally:
        tf1.enable_control_flow_v2()
    order = [op.name for op in computed_ops(result)]
    assert len(order) == len(set(order))
    assert order.index("while/Exit_1") < order.index("while/body") < order.index("while/NextIteration_1")


def test_all_that_a_session_takes_is_understood(graph):
    tensor = tf.constant([1.0], name="t")
    sparse = tf.sparse.SparseTensor(np.zeros((1, 1), np.int64), tensor, [1])
    variable = tf1.get_variable("v", [1])
    found = list_elements(graph, {"a": (tensor, [sparse]), "b": variable, object: "t:0", "c": variable.op})
    assert [element.name for element in found].count("t:0") == 3
    assert list_elements(graph, ["no_such_thing", None, 3]) == []


def test_sources_are_what_a_result_is_made_of_through_data_alone():
    dense, rows, waited_for, unused = (tf.ones([2, 2]) for _ in range(4))
    sparse = tf.IndexedSlices(rows, tf.constant([0, 1]))
    with tf.control_dependencies([waited_for]):
        clipped = tf.clip_by_value(dense, -1.0, 1.0)
    again = tf.IndexedSlices(2.0 * sparse.values, sparse.indices)
    candidates = [dense, sparse, waited_for, unused]
    assert sources_among(candidates, [clipped]) == [dense]
    assert sources_among(candidates, [again]) == [sparse]
    assert sources_among([dense, clipped], [clipped + 1.0]) == [clipped]  # what that one is made of does not count
    assert sources_among(candidates, []) == []


def test_executed_eagerly_everything_may_be_a_source():
    with context.eager_mode():
        dense, other = tf.ones([1]), tf.ones([1])
        assert len(sources_among([dense, other], [dense])) == 2
