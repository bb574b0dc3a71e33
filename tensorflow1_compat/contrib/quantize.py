"""`tf.contrib.quantize`: quantisation-aware training with 8-bit weights and activations.

Fake quantisation is inserted between a layer's weights and its operator, and after the layer's bias and activation.
Batch norms are not folded into weights, so the deployed model must keep them; the first call logs a warning about this.
"""

from __future__ import annotations

import logging
import re

import tensorflow.compat.v1 as tf

from npu_bridge.base.errors import listed, message, say_once
from npu_bridge.base.tf_internals.contrib import moving_average_step
from npu_bridge.base.tf_internals.graphs import update_input
from tensorflow1_compat.contrib.graph_editor.reroute import reroute_ts

_QUANTIZABLE = ("Conv2D", "MatMul", "DepthwiseConv2dNative")
_AFTER = ("BiasAdd", "Add", "AddV2", "FusedBatchNorm", "FusedBatchNormV2", "FusedBatchNormV3")
_ACTIVATIONS = ("Relu", "Relu6", "Identity")
_BATCH_NORMS = ("FusedBatchNorm", "FusedBatchNormV2", "FusedBatchNormV3")


def create_training_graph(input_graph=None, quant_delay=0):
    """Rewrites a training graph in place; call this function before gradients are computed.

    Args:
      input_graph: the graph; None for the default graph.
      quant_delay: number of global steps before values are rounded; ranges are measured from the start.

    Graph: `<layer>/weights_quant/min|max`, `<layer>/act_quant/min|max` and the moving averages of the latter.
    """
    _rewrite(input_graph, True, 8, 8, quant_delay, None)


def create_eval_graph(input_graph=None):
    """Rewrites an evaluation graph in place, which then rounds with the ranges measured in training."""
    _rewrite(input_graph, False, 8, 8, None, None)


def experimental_create_training_graph(
    input_graph=None, weight_bits=8, activation_bits=8, symmetric=False, quant_delay=0, freeze_bn_delay=None, scope=None
):
    """Rewrites a training graph like `create_training_graph`, with 2 to 16 bits, and only within a name scope.

    `freeze_bn_delay` has no effect, since batch norms are not folded.
    """
    _rewrite(input_graph, True, weight_bits, activation_bits, quant_delay, scope, symmetric)


def experimental_create_eval_graph(
    input_graph=None, weight_bits=8, activation_bits=8, symmetric=False, quant_delay=None, scope=None
):
    """Rewrites an evaluation graph like `create_eval_graph`, with 2 to 16 bits, and only within a name scope."""
    _rewrite(input_graph, False, weight_bits, activation_bits, quant_delay, scope, symmetric)


def _rewrite(graph, is_training, weight_bits, activation_bits, quant_delay, scope, symmetric=False):
    graph = graph or tf.get_default_graph()
    updates = [op.name for op in graph.get_operations() if re.match("(Resource)?(Sparse)?Apply", op.type)]
    if updates:
        raise ValueError(message(
            "tf.contrib.quantize", "the graph already has an optimizer, whose gradients would not see the rounding",
            "a graph without operators of an optimizer", listed(updates), "Rewrite the graph before minimize().",
        ))  # fmt: skip
    with graph.as_default():
        layers = [op for op in graph.get_operations() if op.type in _QUANTIZABLE and _find_weight(op) is not None]
        for op in layers:
            if scope and not op.name.startswith(scope):
                continue
            context = op.name.rsplit("/", 1)[0] if "/" in op.name else op.name
            weight = _find_weight(op)
            scope_of_weight = f"{context}/weights_quant"
            rounded = _quantize_weights(weight, scope_of_weight, weight_bits, is_training, quant_delay, symmetric)
            update_input(op, 1, rounded)
            _quantize_output(op, context, activation_bits, is_training, quant_delay, symmetric)


def _find_weight(op):
    """Returns the tensor through which a layer reads its weights; None if the weights are not a variable."""
    tensor = op.inputs[1]
    source = tensor.op
    while source.type in ("Identity", "Cast") and source.inputs:
        source = source.inputs[0].op
    is_variable = source.type in ("VariableV2", "Variable", "ReadVariableOp", "VarHandleOp")
    return tensor if is_variable and op.name.split("/")[0] != "gradients" else None


def _make_range(scope, low, high):
    with tf.variable_scope("", reuse=tf.AUTO_REUSE):
        collections = [tf.GraphKeys.GLOBAL_VARIABLES, tf.GraphKeys.MODEL_VARIABLES]
        return [
            tf.get_variable(f"{scope}/{name}", [], initializer=tf.constant_initializer(value), trainable=False,
                            collections=collections, use_resource=False)
            for name, value in (("min", low), ("max", high))
        ]  # fmt: skip


def _delay_rounding(tensor, rounded, quant_delay):
    if not quant_delay:
        return rounded
    step = tf.train.get_or_create_global_step()
    return tf.cond(step >= quant_delay, lambda: rounded, lambda: tensor)


def _measure(tensor, symmetric, negatives_per_positive=1.0):
    """Returns the least and the largest value that a tensor needs, with 0 between them."""
    low, high = tf.reduce_min(tensor), tf.reduce_max(tensor)
    other = (-high * negatives_per_positive, -low / negatives_per_positive) if symmetric else (0.0, 0.0)
    return tf.minimum(low, other[0]), tf.maximum(high, other[1])


def _quantize_weights(tensor, scope, bits, is_training, quant_delay, symmetric):
    low, high = _make_range(scope, -6.0, 6.0)
    with tf.name_scope(f"{scope}/"):
        if is_training:
            smallest, largest = _measure(tensor, symmetric)
            low = tf.assign(low, smallest, name="AssignMinLast")
            high = tf.assign(high, largest, name="AssignMaxLast")
        rounded = tf.quantization.fake_quant_with_min_max_vars(tensor, low, high, num_bits=bits, narrow_range=True)
        return _delay_rounding(tensor, rounded, quant_delay if is_training else None)


def _quantize_output(op, context, bits, is_training, quant_delay, symmetric):
    last = op
    while True:
        after = [consumer for consumer in last.outputs[0].consumers() if consumer.type in (*_AFTER, *_ACTIVATIONS)]
        if len(after) != 1 or last.type in ("Relu", "Relu6"):
            break
        if after[0].type in _BATCH_NORMS:
            say_once(logging.WARNING, "tf.contrib.quantize: batch norms are not folded into the weights before them.")
        last = after[0]
    tensor, readers = last.outputs[0], list(last.outputs[0].consumers())
    if tensor.dtype != tf.float32:
        return
    scope = f"{context}/act_quant"
    low, high = _make_range(scope, 0.0, 6.0)
    with tf.variable_scope(scope, reuse=tf.AUTO_REUSE, use_resource=False):
        if is_training:
            # Two's complement has one more negative number than positive ones.
            smallest, largest = _measure(tensor, symmetric, 2**bits / (2**bits - 2))
            low = moving_average_step(low, smallest, 0.999, "AssignMinEma")
            high = moving_average_step(high, largest, 0.999, "AssignMaxEma")
        rounded = tf.quantization.fake_quant_with_min_max_vars(tensor, low, high, num_bits=bits)
        rounded = _delay_rounding(tensor, rounded, quant_delay if is_training else None)
    reroute_ts(rounded, tensor, readers)
