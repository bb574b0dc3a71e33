"""Canaries of `npu_bridge/base/tf_internals/functions.py`."""

from __future__ import annotations

import sys

import tensorflow as tf
from tensorflow.core.protobuf.rewriter_config_pb2 import RewriterConfig

from npu_bridge.base.tf_internals import functions
from tests.canaries import canary_of, expect, kept

v1 = tf.compat.v1


@canary_of(
    functions.eager_function_definition,
    functions.add_function,
    functions.redirect_calls_in_block,
    functions.redirect_calls,
    eagerly=True,
)
def _():
    concrete = tf.function(lambda value: value + 1.0).get_concrete_function(tf.TensorSpec([], tf.float32))
    name = concrete.function_def.signature.name
    definition = functions.eager_function_definition(name)
    expect(definition.signature.name == name, "another function is given")
    expect(functions.eager_function_definition("no such function") is None, "a function is given that does not exist")
    (added,) = [node for node in definition.node_def if node.op in ("AddV2", "Add")]
    added.op = "Mul" if added.op == "Add" else "Sub"
    definition.signature.name = f"{name}_changed"
    functions.add_function(definition)
    with functions.redirect_calls_in_block(lambda asked: f"{asked}_changed"):
        changed = float(concrete(tf.constant(5.0)))
        with functions.redirect_calls_in_block(None):
            expect(float(concrete(tf.constant(5.0))) == 6.0, "the innermost one does not count")
    expect(changed != 6.0 and float(concrete(tf.constant(5.0))) == 6.0, "calls are not those that were asked for")


def _call(function):
    return function()


def _call_again(function):
    return function()


@canary_of(functions.keep_from_autograph, eagerly=True)
def _():
    from tensorflow.python.autograph.core import config

    files = []

    def note():
        files.append(sys._getframe(1).f_code.co_filename)

    with kept(config, "CONVERSION_RULES"):
        tf.function(lambda: _call(note))()
        functions.keep_from_autograph(["tests"])
        tf.function(lambda: _call_again(note))()
    expect(files[0] != __file__, "AutoGraph converts nothing at all")
    expect(files[1] == __file__, "the package was converted")


@canary_of(functions.rewritten_graph)
def _():
    config = v1.ConfigProto()
    rewrites = config.graph_options.rewrite_options
    rewrites.auto_mixed_precision_cpu = RewriterConfig.ON
    rewrites.optimizers.append("auto_mixed_precision_cpu")
    rewrites.min_graph_nodes = -1
    matrix = v1.placeholder(tf.float32, [2, 2])
    product = tf.matmul(matrix, matrix)
    result = tf.identity(product)
    nodes = functions.rewritten_graph(v1.get_default_graph(), [result.op.name], config).node
    expect(any(node.op == "Cast" for node in nodes), "the rewriter has not changed the graph")
    expect(product.op.type == "MatMul" and product.dtype == tf.float32, "the graph itself has changed")
