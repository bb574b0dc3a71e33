"""Models of a few operators, sessions in a precision, and what their executors are made of."""

from __future__ import annotations

import collections
import contextlib

import numpy as np
import tensorflow as tf

from npu_bridge.base import environment
from npu_bridge.options import read_session_config, with_optimizer_entry
from npu_bridge.session.precision import Precision, attach_precision

tf1 = tf.compat.v1
MATRIX_KERNELS = ("MatMul", "Conv2D")
_HANDING_ON = ("Cast", "Merge", "Identity", "Reshape", "Transpose", "Relu", "ReluGrad")


def precision_of(**keys):
    """The precision of a run whose session says these keys."""
    return Precision(read_session_config(with_optimizer_entry(None, keys)))


def session_of(graph, precision=None, config=None):
    """A session of a graph that follows a precision; a stock session without one."""
    config = config or tf1.ConfigProto()
    if precision is not None:
        precision.prepare(config)
    session = tf1.Session(graph=graph, config=config)
    if precision is not None:
        attach_precision(session, precision)
    return session


@contextlib.contextmanager
def classic_loops(are_classic=True):
    """Loops and conditions are those of TensorFlow 1, or functions."""
    are_functions = tf1.control_flow_v2_enabled()
    (tf1.disable_control_flow_v2 if are_classic else tf1.enable_control_flow_v2)()
    try:
        yield
    finally:
        (tf1.enable_control_flow_v2 if are_functions else tf1.disable_control_flow_v2)()


class Dense:
    """Two layers under an optimizer, in a graph of their own: five matrix products in a training step."""

    def __init__(self, make_optimizer=lambda: tf1.train.AdamOptimizer(0.01), use_resource=True):
        self.graph = tf.Graph()
        with self.graph.as_default():
            tf1.set_random_seed(7)
            initializer = tf1.random_normal_initializer(stddev=0.4, seed=1)
            self.x = tf1.placeholder(tf.float32, [None, 8], name="x")
            self.hidden = tf1.get_variable("hidden", [8, 16], initializer=initializer, use_resource=use_resource)
            self.bias = tf1.get_variable("bias", [16], initializer=initializer, use_resource=use_resource)
            self.out = tf1.get_variable("out", [16, 4], initializer=initializer, use_resource=use_resource)
            layer = tf.nn.relu(tf.matmul(self.x, self.hidden, name="first") + self.bias)
            self.logits = tf.matmul(layer, self.out, name="second")
            self.loss = tf.reduce_mean(tf.square(self.logits - 1.0), name="loss")
            self.global_step = tf1.train.get_or_create_global_step()
            self.train_op = make_optimizer().minimize(self.loss, global_step=self.global_step)
            self.init = tf1.global_variables_initializer()
            self.variables = tf1.global_variables()

    def batch(self, number):
        return {self.x: np.random.RandomState(number).randn(8, 8).astype(np.float32)}


def run_with_graph(session, fetches, feed_dict=None):
    """Runs and returns the results with the nodes that were really executed."""
    metadata = tf1.RunMetadata()
    options = tf1.RunOptions(output_partition_graphs=True)
    results = session.run(fetches, feed_dict, options, metadata)
    return results, [node for graph in metadata.partition_graphs for node in graph.node]


@contextlib.contextmanager
def started(model, precision=None, config=None):
    """Opens a session of a model with its initial values."""
    with session_of(model.graph, precision, config) as session:
        session.run(model.init)
        yield session


def nodes_of_step(precision, model=None, config=None):
    """Trains a model, `Dense` unless another one is given, for a step; returns the nodes that were executed."""
    model = model or Dense()
    with started(model, precision, config) as session:
        return run_with_graph(session, [model.train_op, model.loss], model.batch(0))[1]


def dtypes_of(nodes, *words):
    """Counts, by dtype, imitated ones included, the nodes whose type contains one of the words."""
    return dict(collections.Counter(dtypes_by_name(nodes, *words).values()))


def kernels_of(nodes, *words):
    """As `dtypes_of`, but an imitated dtype counts as float32, which its kernels are."""
    return dict(collections.Counter(tf.as_dtype(node.attr["T"].type).name for node in _of_types(nodes, words)))


def dtypes_by_name(nodes, *words):
    """The dtype that nodes compute in, by name: of their kernels, or the one that their values are rounded to."""
    by_name = {node.name: node for node in nodes}

    def rounded_to(value):
        node = by_name.get(value.split(":")[0])
        if node is None or node.op not in _HANDING_ON:
            return None
        if node.op == "Cast":
            # Between the two casts TensorFlow may move an operator that hands values on.
            low = tf.as_dtype(node.attr["SrcT"].type)
            return low.name if low in (tf.float16, tf.bfloat16) and node.attr["DstT"].type == tf.float32 else None
        return next(filter(None, map(rounded_to, node.input)), None)

    found = {}
    for node in _of_types(nodes, words):
        read = [value for value in node.input if not value.startswith("^")]
        if "MatMul" in node.op:
            lows = [rounded_to(value) for value in read[:2]]
            low = lows[0] if all(lows) else None
        elif "Conv" in node.op or node.op in _HANDING_ON:
            low = next(filter(None, map(rounded_to, read)), None)
        else:
            low = rounded_to(f"{node.name}/rounded_output_0")
        found[node.name] = low or tf.as_dtype(node.attr["T"].type).name
    return found


def _of_types(nodes, words):
    return [node for node in nodes if "T" in node.attr and any(word in node.op for word in words or MATRIX_KERNELS)]


def tell_steps(now, total):
    environment.write_variable("STEP_NOW", now)
    environment.write_variable("TOTAL_STEP", total)


def values_of(session, variables):
    return dict(zip([variable.name for variable in variables], session.run(variables)))


def load(session, variables, values):
    for variable in variables:
        variable.load(values[variable.name], session)
