"""`tf.contrib.util`: functions for constant tensors, protocol buffers and files."""

from tensorflow.compat.v1 import make_ndarray, make_tensor_proto
from tensorflow.python.framework.tensor_util import constant_value

from npu_bridge.base.tf_internals.graphs import operator_definition


def ops_used_by_graph_def(graph_def):
    """Returns the set of operator types in a GraphDef and its functions."""
    types = {node.op for node in graph_def.node}
    for function in graph_def.library.function:
        types |= {node.op for node in function.node_def}
    return types


def stripped_op_list_for_graph(graph_def):
    """Returns the definitions of the operators in a GraphDef, as an OpList."""
    from tensorflow.core.framework import op_def_pb2

    found = (operator_definition(name) for name in sorted(ops_used_by_graph_def(graph_def)))
    return op_def_pb2.OpList(op=[each for each in found if each is not None])
