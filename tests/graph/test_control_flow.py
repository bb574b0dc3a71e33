"""Loops and conditions, read from operators alone."""

from __future__ import annotations

import pytest
import tensorflow as tf

from npu_bridge.graph.control_flow import Depth, group_by_depth, measure_depths
from npu_bridge.graph.functions import called_functions, nodes_in_functions
from npu_bridge.graph.operators import computed_ops

tf1 = tf.compat.v1


@pytest.fixture
def classic():
    tf1.disable_control_flow_v2()
    yield
    tf1.enable_control_flow_v2()


def test_nested_control_flow_is_grouped_by_depth(classic):
    with tf.Graph().as_default() as original:
        x = tf1.placeholder(tf.float32, [], "x")

        def body(i, y):
            return i + 1, tf1.cond(y > 0, lambda: tf.exp(y, name="inner"), lambda: y)

        looped = tf1.while_loop(lambda i, y: i < 3, body, (0, tf.sin(x, name="outside")))[1]
        result = tf1.cond(looped > 0, lambda: tf.cos(looped, name="side"), lambda: looped)
        definition, name = original.as_graph_def(), result.name
    with tf.Graph().as_default() as imported:  # no contexts any more
        tf.import_graph_def(definition, name="")
        ops = computed_ops([imported.get_tensor_by_name(name)])
        depths = {op.type: depth for op, depth in measure_depths(ops).items()}
    assert depths["Sin"] == Depth()
    assert depths["Exp"].loops == 1
    assert depths["Exp"].conditions > depths["Cos"].conditions == 1
    assert depths["Cos"].loops == 0
    groups = group_by_depth(ops)
    assert sum(map(len, groups.values())) == len(ops)
    assert imported.get_operation_by_name("outside") in groups[Depth()]


def test_what_is_fed_ends_control_flow(classic):
    with tf.Graph().as_default():
        chosen = tf1.cond(tf1.placeholder(tf.bool, []), lambda: tf.constant(1.0), lambda: tf.constant(2.0))
        side = chosen.op.inputs[0]
        after = tf.negative(side)
        assert measure_depths(computed_ops([after]))[after.op] == Depth(0, 1)
        assert measure_depths(computed_ops([after], {side.name}), {side.name})[after.op] == Depth()


def test_functions_within_functions_are_found_once():
    @tf.function
    def inner(x):
        return tf.sinh(x)

    @tf.function
    def outer(x):
        return tf.cosh(inner(x)) + inner(x)

    with tf.Graph().as_default() as graph:
        called, plain = outer(tf.constant(1.0)).op, tf.constant(1.0).op
        (name,) = called_functions(called.node_def)
        assert name.startswith("__inference_outer")
        types = [node.op for node in nodes_in_functions(graph, [called.node_def, called.node_def, plain.node_def])]
        assert types.count("Sinh") == types.count("Cosh") == 1
        assert list(nodes_in_functions(graph, [plain.node_def])) == []


def test_a_type_may_be_the_name_of_a_function():
    from tensorflow.python.framework import function

    with tf.Graph().as_default() as graph:

        @function.Defun(tf.float32, func_name="older")
        def older(x):
            return tf.tan(x)

        op = older(tf.constant(1.0)).op
        assert op.type == "older"
        assert "Tan" in [node.op for node in nodes_in_functions(graph, [op.node_def])]
