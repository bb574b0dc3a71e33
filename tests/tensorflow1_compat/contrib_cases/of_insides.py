"""Modules inside of contrib and of TensorFlow, attributes of its time, queues of examples, shared tables."""

from __future__ import annotations

import importlib
import tempfile
import types
import unittest

import numpy as np
import tensorflow as tf2
import tensorflow.compat.v1 as tf

from tensorflow1_compat import old_attributes, proxies
from tensorflow1_compat.contrib import image, lookup, opt, sparsemax, testing, training
from tensorflow1_compat.lookup import look_up
from tests.tensorflow1_compat.contrib_cases.common import close, error_of, value

INSIDES = (
    "nn.python.ops.alpha_dropout.alpha_dropout",
    "opt.python.training.nadam_optimizer.NadamOptimizer",
    "framework.python.ops.add_arg_scope",
    "rnn.python.ops.rnn_cell.AttentionCellWrapper",
    "rnn.python.ops.lstm_ops._block_lstm",
    "seq2seq.python.ops.beam_search_ops.gather_tree",
    "layers.python.layers.embedding_ops.safe_embedding_lookup_sparse",
    "graph_editor.select.get_ops_ios",
    "slim.python.slim.nets.vgg.vgg_16",
    "learn.python.learn.datasets.mnist.DataSet",
)


def case_insides_of_contrib():
    for name in INSIDES:
        full = f"tensorflow.contrib.{name}"
        module, _, leaf = full.rpartition(".")
        assert callable(proxies.proxy(module).value_of_import(leaf)), name
    inside = proxies.proxy("tensorflow.contrib.nn.python.ops").value_of_import("alpha_dropout")
    short = proxies.proxy("tensorflow.contrib.nn").value_of_import("alpha_dropout")
    assert isinstance(inside, types.ModuleType) and inside.alpha_dropout is short
    function = proxies.proxy("tensorflow.contrib.framework.python.ops").value_of_import("arg_scope")
    assert function is proxies.proxy("tensorflow.contrib.framework.python.ops.arg_scope").arg_scope
    assert look_up("tensorflow.contrib.opt.python.training.nadam_optimizer.NoSuch").missing is not None
    assert look_up("tensorflow.contrib.opt.python.training.no_such").missing is not None


def case_star_imports_bind_no_modules():
    names = proxies.proxy("tensorflow.contrib.rnn").public_names()
    assert "LSTMCell" in names and "tf" not in names
    assert "nest" in proxies.proxy("tensorflow.contrib.framework").public_names()


def case_names_of_split_modules():
    for name, what in (
        ("ops.variables.VariableV1", tf.Variable),
        ("ops.variables.RefVariable", type(tf.Variable(1.0, use_resource=False))),
        ("ops.control_flow_ops.while_loop", tf.while_loop),
        ("ops.array_ops.stack", tf.stack),
        ("framework.ops.Tensor", tf.Tensor),
        ("framework.ops.register_dense_tensor_like_type", callable),
        ("ops.random_ops.random_crop", tf.random_crop),
        ("layers.base.InputSpec", tf.keras.layers.InputSpec),
    ):
        module, _, leaf = f"tensorflow.python.{name}".rpartition(".")
        assert proxies.proxy(module).value_of_import(leaf) is what, name
    for name in ("python.ops.variables.NoSuch", "contrib.keras.no_such"):
        assert look_up(f"tensorflow.{name}").missing is not None, name
    for root in ("tensorflow.python.keras", "keras", "tensorflow.keras"):
        assert callable(proxies.proxy(f"{root}.saving.hdf5_format").save_model_to_hdf5), root
    operators = proxies.proxy("tensorflow.python.framework.op_def_registry").get_registered_ops()
    assert operators["MatMul"].input_arg[1].name == "b" and len(operators) > 1000
    assert look_up("tensorflow.python.estimator.estimator.nosuch").missing is not None
    named = proxies.proxy("tensorflow.python.estimator.run_config").RunConfig
    assert named is proxies.proxy("tensorflow.estimator").RunConfig
    assert proxies.proxy("tensorflow.core.protobuf.config_pb2").RPCOptions().compression_algorithm == ""
    for module in ("tensorflow", "tensorflow.python"):
        assert proxies.proxy(module).pywrap_tensorflow.NewCheckpointReader is tf.train.NewCheckpointReader
    assert proxies.proxy("tensorflow.python.training.tracking.util").value_of_import("capture_dependencies")


def case_old_attributes():
    old_attributes.add_attributes_of_1()
    old_attributes.add_attributes_of_1()  # again: changes nothing
    inputs = tf.keras.layers.Input((3,))
    assert inputs._keras_shape == (None, 3) and inputs._uses_learning_phase is False
    session = tf.keras.backend.get_session()
    assert importlib.import_module("keras.backend").get_session() is session is tf2.keras.backend.get_session()
    inputs._keras_shape = (5, 3)
    assert inputs._keras_shape == (5, 3) and inputs.shape.as_list() == [None, 3]
    model = tf.keras.Sequential([tf.keras.layers.Dense(2, input_shape=(2,), use_bias=False)])
    model.set_weights([np.eye(2)])
    x = np.array([[1.0, 0], [0, 1], [3, 2]])
    assert model.predict_classes(x).tolist() == [0, 1, 0]
    close(model.predict_proba(x), x)
    one = tf.keras.Sequential([tf.keras.layers.Dense(1, input_shape=(2,), kernel_initializer="ones")])
    assert one.predict_classes(np.array([[0.2, 0.1], [0.4, 0.4]])).tolist() == [[0], [1]]
    assert model.layers[0].apply(inputs[:, :2]).shape.as_list() == [None, 2]


def case_old_options_of_input_pipelines_change_no_batch():
    old_attributes.add_attributes_of_2()
    options = tf.data.Options()
    for name in ("autotune", "autotune_buffers", "autotune_cpu_budget", "hoist_random_uniform"):
        setattr(options.experimental_optimization, name, False)
    options.experimental_optimization.map_vectorization.enabled = True
    options.experimental_stats.latency_all_edges = True
    for is_sharded, policy in ((True, "AUTO"), (False, "OFF")):
        options.experimental_distribute.auto_shard = is_sharded
        assert options.experimental_distribute.auto_shard is is_sharded
        assert options.experimental_distribute.auto_shard_policy.name == policy
    assert error_of(AttributeError, setattr, options.experimental_optimization, "nosuch", 1)
    batches = tf.data.Dataset.range(4).batch(2).with_options(options).make_one_shot_iterator()
    close(value(batches.get_next()), [0, 1])


def case_experimental_run_v2_of_a_strategy_is_run():
    old_attributes.add_attributes_of_2()
    strategy = tf.distribute.OneDeviceStrategy("/cpu:0")
    close(value(strategy.experimental_run_v2(lambda x, y: x * y, args=(tf.constant(3.0),), kwargs={"y": 2.0})), 6.0)


def case_buckets():
    length = tf.train.range_input_producer(12, num_epochs=1, shuffle=False).dequeue() % 4 + 1
    word = tf.SparseTensor(tf.cast(tf.range(length)[:, None], tf.int64), tf.fill([length], length), [4])
    lengths, found = training.bucket_by_sequence_length(
        length, {"row": tf.fill([length], length), "sparse": word}, 2, [3], dynamic_pad=True,
        allow_smaller_final_batch=True,
    )  # fmt: skip
    assert lengths.shape.as_list() == [None] and found["row"].shape.as_list() == [None, None]
    assert found["sparse"].shape.rank == 2
    seen = []
    with tf.Session() as session:
        session.run([tf.global_variables_initializer(), tf.local_variables_initializer()])
        coordinator = tf.train.Coordinator()
        threads = tf.train.start_queue_runners(session, coordinator)
        while len(seen) < 12:
            sizes, rows, words = session.run([lengths, found["row"], found["sparse"]])
            assert (sizes >= 3).all() or (sizes < 3).all(), "one bucket a batch"
            assert rows.shape == (len(sizes), sizes.max()) and len(words.values) == sizes.sum()
            seen += sizes.tolist()
        coordinator.request_stop()
        coordinator.join(threads)
    assert sorted(seen) == sorted([1, 2, 3, 4] * 3)
    for bad in ([], [3, 3], ["a"]):
        said = error_of((TypeError, ValueError), training.bucket_by_sequence_length, length, [length], 2, bad)
        assert "bucket_boundaries" in said


def case_tables_of_one_name_are_one():
    first, second = (
        lookup.HashTable(lookup.KeyValueTensorInitializer(["a"], [at]), 0, shared_name="t") for at in (7, 8)
    )
    found = value([first.lookup(tf.constant(["a"])), second.lookup(tf.constant(["a"]))])
    assert found[0] == found[1] and found[0] in (7, 8)


def case_colours_need_three_channels():
    for shape, kind in (((2, 3), ValueError), ((4, 2, 4), tf.errors.InvalidArgumentError)):
        said = error_of(kind, image.adjust_hsv_in_yiq, tf.zeros(shape), 0.1)
        assert "adjust_hsv_in_yiq" in said


def case_sparsemax_of_what_is_no_number():
    found = value(sparsemax.sparsemax(tf.constant([[0.0, np.nan, 1], [-np.inf, 0, 0], [np.inf, 0, 0]])))
    assert np.isnan(found[0]).all() and np.isnan(found[2]).all()
    close(found[1], [0, 0.5, 0.5])


def case_tests_in_both_modes():
    decorate = proxies.proxy("tensorflow.python.framework.test_util").run_in_graph_and_eager_modes
    seen = []
    for method in (decorate(lambda self: seen.append(1)), decorate(reset_test=True)(lambda self: seen.append(2))):
        result = unittest.TestResult()
        type("BothModes", (tf.test.TestCase,), {"test": method})("test").run(result)
        assert result.wasSuccessful(), result.errors
    assert seen == [1, 1, 2, 2]


def case_event_files():
    with tempfile.TemporaryDirectory() as folder:
        with tf.summary.FileWriter(folder, tf.get_default_graph()) as writer:
            writer.add_summary(tf.Summary(value=[tf.Summary.Value(tag="x", simple_value=2)]), 3)
        (event,) = testing.latest_summaries(folder)
        assert event.step == 3 and event.summary.value[0].simple_value == 2
        assert len(testing.latest_events(folder)) > 1


def case_a_list_of_hyper_parameters_needs_brackets():
    said = error_of(ValueError, training.HParams(layers=[1, 2]).parse, "layers=3")
    assert "Write layers=[3]." in said


def case_averages_are_those_of_the_updated_values():
    weight = tf.get_variable("averaged", initializer=3.0)
    optimizer = opt.MovingAverageOptimizer(tf.train.GradientDescentOptimizer(1.0), average_decay=0.5)
    train = optimizer.minimize(weight)
    averaging = [op for op in train.graph.get_operations() if op.name.startswith("ExponentialMovingAverage/")]
    assert {before.name for op in averaging for before in op.control_inputs} == {"GradientDescent"}
    saver = optimizer.swapping_saver()
    with tempfile.TemporaryDirectory() as folder, tf.Session() as session:
        session.run(tf.global_variables_initializer())
        session.run(train)
        path = saver.save(session, f"{folder}/model")
        assert tf.train.load_variable(path, "averaged") == 2.5
