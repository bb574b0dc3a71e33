"""The table of levels, cell by cell: what it says, and what models trained under each level are made of."""

from __future__ import annotations

import functools

import numpy as np
import pytest
import tensorflow as tf

from npu_bridge import amp
from npu_bridge.base.tf_internals.sessions import collected_function_graphs
from npu_bridge.npu_init import npu_config_proto  # noqa: F401 - from now on sessions follow their settings
from tests.session.precision.small_models import dtypes_by_name, run_with_graph, tf1

CELLS = (
    "variables",
    "batch norm variables",
    "convolution",
    "product",
    "batch norm",
    "updates",
    "inputs",
    "outputs",
    "scale",
)
# The expected facts by level and overrides; "low" is the dtype of 16 bits. Updates are float32 at every level.
KERAS = {
    ("O0",): ("float32",) * 8 + (1.0,),
    ("O1",): ("float32", "float32", "low", "low", "float32", "float32", "float32", "float32", 2.0**16),
    ("O2",): ("float32", "float32", "low", "low", "float32", "float32", "low", "float32", 2.0**16),
    ("O3",): ("low", "low", "low", "low", "low", "float32", "low", "float32", 1.0),
    ("O2", "master_weights"): ("low", "float32", "low", "low", "float32", "float32", "low", "float32", 2.0**16),
    ("O3", "master_weights"): ("float32", "float32", "low", "low", "low", "float32", "low", "float32", 1.0),
}
# Of a TF 1 graph the tensors that a script handles stay float32 at every level.
SESSION = {case: (*cells[:6], "float32", "float32", cells[8]) for case, cells in KERAS.items()}
DTYPES = ("float16", "bfloat16")


def overrides_of(case, low):
    given = {} if low == "float16" or case[0] == "O0" else {"low_dtype" if case[0] == "O1" else "cast_model_type": low}
    return {**given, **dict.fromkeys(case[1:], case[0] == "O3")}


def pictures():
    random = np.random.RandomState(0)
    return random.randn(8, 6, 6, 3).astype("float32"), random.randn(8, 2).astype("float32")


def read_weights(model):
    return [weight.astype("float32") for weight in model.get_weights()]


def dtype_of(values):
    (name,) = {tf.as_dtype(value.dtype).base_dtype.name for value in values}
    return name


def kernels_of(nodes):
    """The dtype in which operators of a kind compute, by kind; float32 casts and shapes do not count."""
    kinds = {"convolution": "Conv2D", "product": "MatMul", "batch norm": "FusedBatchNorm", "updates": "ApplyGradient"}
    found = {kind: set(dtypes_by_name(nodes, word).values()) for kind, word in kinds.items()}
    return {kind: dtypes.pop() if len(dtypes) == 1 else sorted(dtypes) for kind, dtypes in found.items() if dtypes}


@functools.cache
def seen_in_keras(case, low):
    """Returns the parts of a Keras model that was trained for two steps."""
    layers = tf.keras.layers
    inputs = tf.keras.Input([6, 6, 3])
    hidden = layers.BatchNormalization()(layers.Conv2D(4, 3)(inputs))
    model = tf.keras.Model(inputs, layers.Dense(2)(layers.Flatten()(tf.nn.relu(hidden))))
    before = read_weights(model)
    optimizer = tf.keras.optimizers.legacy.SGD(0.01)
    made = amp.configure(case[0], optimizer, model, is_distributed=False, **overrides_of(case, low))
    assert all(np.allclose(*pair, atol=0.01) for pair in zip(before, read_weights(made.model)))
    scale = float(made.loss_scale_managers[0].get_loss_scale()) if made.loss_scale_managers else 1.0
    made.model.compile(made.optimizer, "mse")
    with collected_function_graphs() as metadata:
        losses = made.model.fit(*pictures(), batch_size=8, epochs=6, verbose=0).history["loss"]
    assert np.isfinite(losses).all() and not all(map(np.array_equal, before, read_weights(made.model)))
    nodes = [n for function in metadata.function_graphs for graph in function.partition_graphs for n in graph.node]
    (norm,) = [layer for layer in made.model.layers if isinstance(layer, layers.BatchNormalization)]
    others = [variable for variable in made.model.weights if all(variable is not own for own in norm.weights)]
    return {
        **kernels_of(nodes),
        "variables": dtype_of(others),
        "batch norm variables": dtype_of(norm.weights),
        "inputs": dtype_of(made.model.inputs),
        "outputs": dtype_of([made.model(pictures()[0])]),
        "scale": scale,
    }


@functools.cache
def seen_in_session(case, low):
    """Returns the parts of a TF 1 script's graph after two steps of training."""
    made = amp.configure(case[0], **overrides_of(case, low))
    with tf.Graph().as_default() as graph:
        tf1.set_random_seed(1)
        features, labels = pictures()
        with made.building():
            inputs = tf.constant(features)
            hidden = tf1.layers.batch_normalization(tf1.layers.conv2d(inputs, 4, 3), training=True)
            outputs = tf1.layers.dense(tf1.layers.flatten(tf.nn.relu(hidden)), 2)
        loss = tf.reduce_mean(tf.square(outputs - labels))
        optimizer = made.wrap(tf1.train.GradientDescentOptimizer(0.01))
        with tf.control_dependencies(tf1.get_collection(tf1.GraphKeys.UPDATE_OPS)):
            train_op = optimizer.minimize(loss)
        scale = made.loss_scale_managers[0].get_loss_scale() if made.loss_scale_managers else tf.constant(1.0)
        with tf1.Session(graph=graph, config=made.session_config()) as session:
            session.run(tf1.global_variables_initializer())
            used = session.run(scale)
            losses = [session.run([loss, train_op])[0] for _ in range(5)]  # the first ones may overflow
            nodes = run_with_graph(session, [loss, train_op])[1]
            assert np.isfinite(session.run(scale))
        assert np.isfinite(losses).all() and losses[0] != losses[-1]
        names = ("gamma", "beta", "moving_mean", "moving_variance")
        variables = [v for v in tf1.global_variables() if v.op.name.startswith(("conv2d", "dense", "batch"))]
        variables = [variable for variable in variables if not variable.op.name.endswith("/float32")]
        norm = [variable for variable in variables if variable.op.name.endswith(names)]
        others = [variable for variable in variables if not variable.op.name.endswith(names)]
        assert len(norm) == 4 and len(others) == 4
    return {
        **kernels_of(nodes),
        "variables": dtype_of(others),
        "batch norm variables": dtype_of(norm),
        "inputs": dtype_of([inputs]),
        "outputs": dtype_of([outputs]),
        "scale": float(used),
    }


def cells(table, dtypes=DTYPES):
    for case, values in table.items():
        for low in dtypes if case != ("O0",) else dtypes[:1]:
            for cell, value in zip(CELLS, values):
                yield pytest.param(
                    case, low, cell, low if value == "low" else value, id=f"{'+'.join(case)}-{low}-{cell}"
                )


@pytest.mark.few_fast("each", "not every pair")
@pytest.mark.parametrize("case, low, cell, expected", cells(KERAS))
def test_a_keras_model(case, low, cell, expected):
    assert seen_in_keras(case, low)[cell] == expected


@pytest.mark.few_fast("each", "not every pair")
@pytest.mark.parametrize("case, low, cell, expected", cells(SESSION))
def test_a_session(case, low, cell, expected):
    assert seen_in_session(case, low)[cell] == expected
