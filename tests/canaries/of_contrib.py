"""Canaries of `npu_bridge/base/tf_internals/contrib.py` and `estimators.py`."""

from __future__ import annotations

import importlib
import importlib.machinery
import os
import tempfile
import unittest

import numpy as np
import tensorflow as tf

from npu_bridge.base.tf_internals import contrib, estimators
from npu_bridge.base.tf_internals.names import KERAS
from tests.canaries import canary_of, expect, kept

v1 = tf.compat.v1


@canary_of(contrib.constant_shape)
def _():
    shape = contrib.constant_shape(tf.stack([tf.shape(v1.placeholder(tf.float32, [None]))[0], 3]))
    expect(shape.as_list() == [None, 3], f"the shape is {shape}")


@canary_of(contrib.accept_whole_floats)
def _():
    contrib.accept_whole_floats()
    expect(v1.Dimension(64 / 2) == 32, "a whole float is not a size")


@canary_of(contrib.raise_batch_norm_epsilons)
def _():
    from tensorflow.python.ops import nn_impl

    with kept(nn_impl, "gen_nn_ops"):
        for _ in range(2):
            contrib.raise_batch_norm_epsilons()
        one, x = tf.ones([1]), tf.constant(np.sqrt([[[[1e-5]], [[0.0]]]]), tf.float32)
        for epsilon, expected in ((1e-9, 1.001e-5), (2e-5, 2e-5)):
            y = v1.nn.fused_batch_norm(x, one, 0 * one, 0 * one, one * 0, epsilon, is_training=False)[0]
            y = v1.Session().run(y) if not tf.executing_eagerly() else y.numpy()
            expect(np.allclose(y.max() ** 2, 1e-5 / expected, rtol=1e-5), f"{epsilon} gives {y.max()}")


@canary_of(contrib.take_logits_of_same_activation)
def _():
    with kept(backend := importlib.import_module(f"{KERAS}.src.backend"), "_get_logits"):
        contrib.take_logits_of_same_activation(backend)
        softmax = tf.nn.softmax(v1.placeholder(tf.float32, [1, 2]))
        for kind in ("Softmax", "Sigmoid"):
            found = backend._get_logits(softmax, False, kind, "")
            expect(found == ((softmax.op.inputs[0], True) if kind == "Softmax" else (softmax, False)), f"{found}")


@canary_of(contrib.load_generated_code_with)
def _():
    from tensorflow.python.autograph.pyct import loader as loader_of_autograph

    loaded = []

    class Loader(importlib.machinery.SourceFileLoader):
        def exec_module(self, module):
            loaded.append(module.__name__)
            super().exec_module(module)

    with kept(loader_of_autograph, "importlib"):
        contrib.load_generated_code_with(Loader)
        converted = tf.autograph.to_graph(_with_a_condition)
        expect(converted(tf.constant(1)) is not None and loaded, "generated code is loaded otherwise")


def _with_a_condition(x):
    return x if x > 0 else -x


@canary_of(contrib.run_in_both_modes)
def _():
    seen = []
    method = contrib.run_in_both_modes(lambda self: seen.append(tf.executing_eagerly()), use_gpu=False)
    kind = type("BothModes", (tf.test.TestCase,), {"test": method})
    result = unittest.TestResult()
    kind("test").run(result)
    expect(result.wasSuccessful() and seen == [False, True], f"the modes were {seen}: {result.errors}")


@canary_of(contrib.moving_average_step)
def _():
    with tf.Graph().as_default(), v1.Session() as session:
        average = v1.get_variable("average", [], initializer=v1.zeros_initializer(), use_resource=False)
        step = contrib.moving_average_step(average, tf.constant(4.0), 0.5, "step")
        session.run(v1.global_variables_initializer())
        expect(session.run(step) == 4.0, "the average begins at zero")
        expect(len(v1.global_variables()) == 3, "what it is divided by is not in variables")


@canary_of(contrib.column_with_ids)
def _():
    column = v1.feature_column.categorical_column_with_identity("c", 3)
    other = contrib.column_with_ids(column, lambda ids: tf.SparseTensor(ids.indices, ids.values % 3, ids.dense_shape))
    with tf.Graph().as_default(), v1.Session() as session:
        features = {"c": tf.constant([[5]], tf.int64)}
        layer = v1.feature_column.input_layer(features, [v1.feature_column.indicator_column(other)])
        expect(session.run(layer).tolist() == [[0, 0, 1]], "the ids are those of the stock column")


@canary_of(contrib.has_own_update)
def _():
    stock = v1.train.GradientDescentOptimizer(0.1)
    expect(contrib.has_own_update(stock), "stock's optimizers update nothing")
    expect(not contrib.has_own_update(v1.train.SyncReplicasOptimizer(stock, 1)), "one around another updates itself")


@canary_of(contrib.remove_squeezable_dimensions)
def _():
    labels, predictions = contrib.remove_squeezable_dimensions(tf.zeros([4, 1]), tf.zeros([4]), None)
    expect(labels.shape == [4] and predictions.shape == [4], "ranks differ")


@canary_of(contrib.flatten_up_to)
def _():
    flat = contrib.flatten_up_to((tf.float32, tf.int32), ([1, 2], [3]))
    expect(flat == [[1, 2], [3]], f"the parts are {flat}")


@canary_of(contrib.flatten_element, contrib.pack_element)
def _():
    expect(contrib.flatten_element({"a": [1, 2], "b": 3}) == [[1, 2], 3], "a list was taken apart")
    expect(contrib.pack_element({"a": 1, "b": 2}, [3, 4]) == {"a": 3, "b": 4}, "the structure is another one")


@canary_of(contrib.lookup_ops)
def _():
    module = contrib.lookup_ops()
    table = module.index_table_from_tensor(["a", "b"], hasher_spec=module.FastHashSpec, dtype=tf.string)
    words = module.index_to_string_table_from_tensor(["a", "b"], default_value="UNK")
    with tempfile.TemporaryDirectory() as folder, v1.Session() as session:
        path = os.path.join(folder, "words")
        with open(path, "w", encoding="utf-8") as file:
            file.write("a\nb\n")
        lines = module.index_table_from_file(path)
        session.run(v1.tables_initializer())
        found = session.run([table.lookup(tf.constant("b")), words.lookup(tf.constant(1, tf.int64)), lines.size()])
    expect(found == [1, b"b", 2], f"tables give {found}")


@canary_of(contrib.write_profile)
def _():
    profiler = v1.profiler.Profiler(v1.get_default_graph())
    metadata = v1.RunMetadata()
    with v1.Session() as session:
        session.run(tf.random.uniform([2]), options=v1.RunOptions(trace_level=3), run_metadata=metadata)
    profiler.add_step(1, metadata)
    with tempfile.TemporaryDirectory() as folder:
        contrib.write_profile(profiler, os.path.join(folder, "profile"))
        expect(os.path.getsize(os.path.join(folder, "profile")) > 0, "the file is empty")


@canary_of(contrib.keras_loss_scale_optimizer, eagerly=True)
def _():
    optimizer = contrib.keras_loss_scale_optimizer()(
        tf.keras.optimizers.legacy.SGD(0.1), dynamic=False, initial_scale=8.0
    )
    expect(float(optimizer.loss_scale) == 8.0, "the scale is another one")


@canary_of(contrib.keras_of_tf1, contrib.rnn_cell_base)
def _():
    cells = v1.nn.rnn_cell
    expect(contrib.keras_of_tf1().layers.Dense is v1.keras.layers.Dense, "Keras is another one")
    expect(issubclass(contrib.rnn_cell_base(), cells.RNNCell), "it is no cell")
    expect(issubclass(cells.BasicLSTMCell, contrib.rnn_cell_base()), "cells have another base")


@canary_of(contrib.keras_engine_classes)
def _():
    functional, layer, spec = contrib.keras_engine_classes()
    inputs = tf.keras.Input([2])
    model = tf.keras.Model(inputs, tf.keras.layers.Dense(1)(inputs))
    expect(isinstance(model, functional) and isinstance(model.layers[0], layer), "they are of other classes")
    expect(spec(shape=[None, 2]).shape == (None, 2), "the shape is another one")


@canary_of(contrib.background_saver_hook)
def _():
    hook = contrib.background_saver_hook()(tempfile.mkdtemp(), save_steps=1)
    expect(isinstance(hook, v1.train.SessionRunHook), "it is no hook")


@canary_of(estimators.add_estimator_module)
def _():
    expect(issubclass(tf.estimator.Estimator, v1.estimator.Estimator), "the two classes are strangers")
    config = v1.estimator.RunConfig(train_distribute=tf.distribute.OneDeviceStrategy("/cpu:0"))
    expect(config.is_chief, "it is one of several processes")
    tpu = importlib.import_module("tensorflow.compat.v1.estimator").tpu
    expect(tpu.TPUEstimatorSpec(mode="eval", loss=tf.constant(1.0)).mode == "eval", "the mode is another one")


@canary_of(contrib.missing_names_by_module)
def _():
    for module, names in contrib.missing_names_by_module().items():
        expect(all(hasattr(v1, name) for name in names), f"{module.__name__}: {names} are not public")


@canary_of(contrib.variable_scope_module)
def _():
    with contrib.variable_scope_module().variable_scope("scope") as scope:
        expect(scope.name == "scope", "the scope has another name")


@canary_of(contrib.replacements_of_layer_modules)
def _():
    found = {module.__name__: other for module, other in contrib.replacements_of_layer_modules().items()}
    result = found["tensorflow.python.layers.core"].dense(tf.ones([1, 2]), 3)
    with v1.Session() as session:
        session.run(v1.global_variables_initializer())
        expect(np.shape(session.run(result)) == (1, 3), "a dense layer gives another shape")
