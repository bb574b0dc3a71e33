"""`tf.contrib.framework`: model variables, argument scopes, checkpoints, nested structures."""

import tensorflow.compat.v1 as tf
from tensorflow.python.framework.smart_cond import smart_cond, smart_constant_value
from tensorflow.python.framework.tensor_spec import BoundedTensorSpec
from tensorflow.python.framework.tensor_util import constant_value, is_tensor
from tensorflow.python.ops.gen_state_ops import is_variable_initialized as _is_variable_initialized
from tensorflow.python.util import nest
from tensorflow.python.util.deprecation import deprecated, deprecated_arg_values, deprecated_args
from tf_slim.ops.arg_scope import *
from tf_slim.ops.framework_ops import *
from tf_slim.ops.variables import *

from npu_bridge.base.search import search as _search
from tensorflow1_compat.contrib.framework.tensor_util import (
    assert_same_float_dtype,
    assert_scalar,
    assert_scalar_int,
    convert_to_tensor_or_sparse_tensor,
    reduce_sum_n,
    remove_squeezable_dimensions,
    with_same_shape,
    with_shape,
)
from tensorflow1_compat.contrib.slim import patches

argsort = tf.argsort
sort = tf.sort
CriticalSection = tf.CriticalSection
TensorSpec = tf.TensorSpec


def init_from_checkpoint(checkpoint_dir, assignment_map):
    """Calls `tf.train.init_from_checkpoint`."""
    return tf.train.init_from_checkpoint(checkpoint_dir, assignment_map)


def list_variables(checkpoint_dir):
    """Returns (name, shape) of each variable in a checkpoint."""
    return tf.train.list_variables(checkpoint_dir)


def load_checkpoint(filepattern):
    """Returns a reader of a checkpoint."""
    return tf.train.load_checkpoint(filepattern)


def load_variable(checkpoint_dir, name):
    """Returns the value of a variable in a checkpoint."""
    return tf.train.load_variable(checkpoint_dir, name)


def fuse_op(graph_def, input_nodes, output_nodes, output_dtypes, output_quantized, op_name, op_type):
    """Returns a graph in which one new node replaces all nodes between input and output nodes.

    Args:
      graph_def: the GraphDef, which stays unchanged.
      input_nodes, output_nodes: names of the border nodes, which are kept; output nodes read the new node.
      output_dtypes: types of the new node's outputs, in order (attribute `_output_types`).
      output_quantized: value of the attribute `_output_quantized`.
      op_name, op_type: name and type of the new node.

    Returns:
      A new GraphDef.
    """
    nodes = {node.name: node for node in graph_def.node}

    def names_inside(references):
        names = [reference.split(":")[0].lstrip("^") for reference in references]
        return [name for name in names if name not in input_nodes]

    start = [name for output in output_nodes for name in names_inside(nodes[output].input)]
    inside = set(_search(start, lambda name: names_inside(nodes[name].input)))
    fused = tf.NodeDef(name=op_name, op=op_type, input=list(input_nodes))
    fused.attr["_output_types"].list.type.extend(tf.as_dtype(each).as_datatype_enum for each in output_dtypes)
    fused.attr["_output_quantized"].b = output_quantized
    made = tf.GraphDef(versions=graph_def.versions, library=graph_def.library)
    for node in graph_def.node:
        if node.name == output_nodes[0]:
            made.node.append(fused)
        if node.name not in inside:
            kept = made.node.add()
            kept.CopyFrom(node)
            if node.name in output_nodes:
                port = output_nodes.index(node.name)
                kept.input[:] = [f"{op_name}:{port}" if port else op_name]
    return made


patches.add_missing_names()
