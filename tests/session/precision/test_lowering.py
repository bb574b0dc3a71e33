"""Which operators are lowered: the same ones that TensorFlow's rewriter lowers, on graphs of real models."""

from __future__ import annotations

import os

import numpy as np
import pytest
import tensorflow as tf
from tensorflow.core.protobuf.rewriter_config_pb2 import RewriterConfig

from npu_bridge.base.tf_internals.functions import rewritten_graph
from npu_bridge.session.precision import rewriter
from npu_bridge.session.precision.lowering import find_lowered_ops, node_of_op
from npu_bridge.session.precision.type_lists import type_lists_for
from tests.session.precision.small_models import classic_loops

tf1 = tf.compat.v1
PASSES = {"float16": "auto_mixed_precision_cpu", "bfloat16": "auto_mixed_precision_onednn_bfloat16"}
BATCH = np.random.RandomState(0).randn(8, 12, 16).astype(np.float32)


def perceptron():
    hidden = tf.constant(BATCH[:, 0])
    for activation in (tf.nn.relu, tf.nn.gelu, tf.tanh, tf.nn.softmax, tf.exp):
        hidden = tf1.layers.dense(hidden, 16, activation)
    return tf.reduce_mean(tf.square(hidden)) + 0.01 * tf.nn.l2_loss(tf1.trainable_variables()[0])


def convolutional():
    value = tf.reshape(tf.constant(BATCH), [8, 12, 16, 1])
    for strides in (1, 2):
        value = tf1.layers.conv2d(value, 4, 3, strides, "same")
        value = tf.nn.relu(tf1.layers.batch_normalization(value, training=True))
        value = tf.concat([value, tf.pad(value[:, 1:], [[0, 0], [1, 0], [0, 0], [0, 0]])], -1)
    value = tf1.layers.max_pooling2d(value, 2, 2)
    logits = tf1.layers.dense(tf1.layers.flatten(value), 3)
    return tf1.losses.sparse_softmax_cross_entropy(np.zeros(8, np.int32), logits)


def attention():
    inputs = tf.constant(BATCH)
    query, key, value = (tf1.layers.dense(inputs, 16, name=name) for name in ("query", "key", "value"))
    weights = tf.nn.dropout(tf.nn.softmax(tf.matmul(query, key, transpose_b=True) / 4.0), 0.1)
    outputs = tf.einsum("btu,bud->btd", weights, value) + inputs
    mean, variance = tf.nn.moments(outputs, [-1], keepdims=True)
    outputs = tf.nn.batch_normalization(outputs, mean, variance, None, None, 1e-6)
    return tf.reduce_mean(tf.gather(tf1.layers.dense(outputs, 4), [0, 2]))


def recurrent():
    cell = tf1.nn.rnn_cell.LSTMCell(8)
    outputs, _ = tf1.nn.dynamic_rnn(cell, tf.constant(BATCH), dtype=tf.float32)
    return tf.reduce_mean(tf1.layers.dense(outputs, 2) ** 2)


def lowered_by_tensorflow(graph, fetches, low_dtype):
    config = tf1.ConfigProto()
    rewrites = config.graph_options.rewrite_options
    setattr(rewrites, PASSES[low_dtype], RewriterConfig.ON)
    rewrites.optimizers.append(PASSES[low_dtype])
    rewrites.min_graph_nodes = -1
    nodes = rewritten_graph(graph, fetches, config).node
    before = {op.name for op in graph.get_operations()}
    lowered_nodes = [node for node in nodes if node.attr["T"].type == tf.as_dtype(low_dtype) and node.name in before]
    return {node.name for node in lowered_nodes if node.op not in ("Shape", "ShapeN", "Rank")}  # they read no values


@pytest.mark.parametrize("low_dtype", PASSES)
@pytest.mark.parametrize("model", [perceptron, convolutional, attention, recurrent])
@pytest.mark.parametrize("has_references", [False, True], ids=["resources", "references"])
def test_the_same_operators_as_by_tensorflow(model, low_dtype, has_references, monkeypatch):
    if not tf.__version__.startswith("2.15."):
        pytest.skip("later versions of TensorFlow have other lists; those of 2.15 hold here whatever the version")
    if low_dtype == "bfloat16" and not rewriter.can_lower(low_dtype):
        pytest.skip("TensorFlow lowers nothing to bfloat16 here, so there is nothing to compare with")
    with classic_loops(), tf.Graph().as_default() as graph:
        with tf1.variable_scope("", use_resource=not has_references):
            train_op = tf1.train.AdamOptimizer().minimize(loss := model())
    fetches = [train_op.name, loss.op.name]
    nodes = {
        op.name: node_of_op(op, lambda tensor: tensor, op.name not in fetches and not op.op_def.is_stateful)
        for op in graph.get_operations()
    }
    ours = find_lowered_ops(nodes, type_lists_for(low_dtype, os.environ), low_dtype)
    theirs = lowered_by_tensorflow(graph, fetches, low_dtype)
    assert len(theirs) > 5
    assert ours == theirs
