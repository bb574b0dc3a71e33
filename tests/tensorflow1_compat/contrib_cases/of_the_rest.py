"""Images, tables, summaries, distributions, equations, graphs and smaller modules of `tf.contrib`; old Keras."""

from __future__ import annotations

import pathlib
import tempfile

import numpy as np
import tensorflow.compat.v1 as tf

from tensorflow1_compat import graph_transforms, keras_policies, old_keras, old_rules, proxies
from tensorflow1_compat.contrib import (
    all_reduce,
    autograph,
    checkpoint,
    distribute,
    distributions,
    eager,
    image,
    keras,
    memory_stats,
    nccl,
    nn,
    rnn,
    saved_model,
    summary,
    tensorboard,
    tfprof,
)
from tensorflow1_compat.contrib.compiler import jit, xla
from tests.tensorflow1_compat.contrib_cases.common import close, error_of, names, value

PICTURE = np.random.RandomState(0).rand(5, 5, 1).astype(np.float32)


def case_colours():
    colours = tf.constant(np.random.RandomState(1).rand(4, 4, 3), tf.float32)
    close(*value([image.adjust_hsv_in_yiq(colours), colours]), 1e-3)
    close(*value([image.adjust_hsv_in_yiq(colours, scale_value=0.5), colours * 0.5]), 1e-3)
    grey = value(image.adjust_hsv_in_yiq(colours, scale_saturation=0.0))
    close(grey[..., 0], grey[..., 1], 1e-2)
    assert value(image.random_hsv_in_yiq(colours, 0.3, 0.8, 1.2, 0.9, 1.1)).shape == (4, 4, 3)


def case_summaries_write_themselves():
    step = tf.train.get_or_create_global_step()
    with tempfile.TemporaryDirectory() as folder:
        with summary.create_file_writer(folder, flush_millis=10).as_default(), summary.always_record_summaries():
            summary.scalar("loss", tf.constant(3.0), step=step)
            with tf.Session() as session:
                session.run(tf.global_variables_initializer())
                summary.initialize(session=session, graph=session.graph)
                session.run(summary.all_summary_ops())
                session.run(summary.flush())
        (path,) = pathlib.Path(folder).iterdir()
        tags = [each.tag for event in tf.train.summary_iterator(str(path)) for each in event.summary.value]
        assert "loss" in tags


def case_distributions():
    x = np.random.RandomState(0).rand(3, 11).astype(np.float32)
    close(value(distributions.percentile(tf.constant(x), 30.0)), np.percentile(x, 30, method="nearest"))
    close(value(distributions.percentile(x, 50.0, axis=1)), np.median(x, 1))
    close(value(distributions.percentile(x, 55.0, axis=[1], interpolation="higher", keep_dims=True)),
          np.percentile(x, 55, axis=1, method="higher", keepdims=True))  # fmt: skip
    medians = [distributions.percentile(tf.range(1.0, count + 1), 50.0) for count in (2, 4, 6, 8)]
    assert value(medians) == [2, 2, 4, 4]  # those of 1.15
    normal = distributions.MultivariateNormalDiag([0.0, 1.0], [1.0, 2.0])
    one = distributions.Normal([0.0, 1.0], [1.0, 2.0])
    close(*value([normal.log_prob([0.5, 0.5]), tf.reduce_sum(one.log_prob([0.5, 0.5]))]))
    assert value(normal.sample(7)).shape == (7, 2)
    unit = distributions.Normal([0.0, 0.0], [1.0, 1.0])
    other = distributions.MultivariateNormalDiag([0.0, 0.0], [1.0, 1.0])
    close(*value([distributions.kl_divergence(normal, other),
                  tf.reduce_sum(distributions.kl_divergence(one, unit))]))  # fmt: skip


def case_frozen_graphs_are_stripped():
    x = tf.placeholder(tf.float32, [], name="x")
    kept = tf.multiply(x, 3.0, name="kept")
    tf.add(kept, 1.0, name="left_out")
    graph = tf.get_default_graph().as_graph_def()
    done = graph_transforms.TransformGraph(graph, ["x"], ["kept:0"], ["fold_constants(x=y)", "strip_unused_nodes"])
    assert {node.name for node in done.node} == {"x", "kept", "kept/y"}
    said = error_of(NotImplementedError, graph_transforms.TransformGraph, graph, ["x"], ["kept"], ["quantize_weights"])
    assert "quantize_weights" in said, "a transform that changes numbers is not left out without a word"


def case_the_batch_of_transposed_convolutions_is_known():
    x = tf.placeholder(tf.float32, [None, 2, 2, 8])
    for shape in ([8, 4, 4, 4], tf.stack([8, 4, 4, 4])):
        result = old_rules.conv2d_transpose(x, tf.ones([5, 5, 4, 8]), output_shape=shape, strides=[1, 2, 2, 1])
        assert result.shape.as_list() == [8, 4, 4, 4]
    shape = tf.stack([tf.shape(x)[0], 4, 4, 4])
    assert old_rules.conv2d_transpose(x, tf.ones([5, 5, 4, 8]), shape, 2).shape.as_list() == [None, 4, 4, 4]


def case_profiles():
    tf.get_variable("w", [3, 4])
    options = {**tfprof.model_analyzer.TRAINABLE_VARS_PARAMS_STAT_OPTIONS, "output": "none"}
    found = tfprof.model_analyzer.print_model_analysis(tf.get_default_graph(), tfprof_options=options)
    assert found.total_parameters == 12
    with tempfile.TemporaryDirectory() as folder, tf.Session() as session:
        with tfprof.ProfileContext(folder, trace_steps=[1], dump_steps=[1, 2]):
            for _ in range(2):
                session.run(tf.constant(1))
        session.run(tf.constant(1))
        assert [path.name for path in pathlib.Path(folder).iterdir()] == ["profile_1"]


def case_constants_win_over_nan():
    x = tf.constant([np.nan, 1.0, -1.0])
    least, most = old_rules.maximum(1e-10, x, name="guard"), old_rules.minimum(np.float32(0.5), x)
    gradients = tf.gradients(least, x) + tf.gradients(most, x)
    found = value([least, most, *gradients])
    # The results of TensorFlow 1.15.
    for numbers, expected in zip(found, ([1e-10, 1, 1e-10], [0.5, 0.5, -1], [1, 1, 0], [1, 0, 1])):
        close(numbers, expected)
    assert np.isnan(value(old_rules.maximum(x, 1e-10))[0]) and "guard" in {op.name for op in x.graph.get_operations()}
    assert value(old_rules.maximum(2, tf.constant(1))) == 2
    assert proxies.proxy("tensorflow").value_of_import("maximum") is proxies.proxy("tensorflow.math").value_of_import(
        "maximum"
    )


def case_memory_stats():
    now, most = memory_stats.BytesInUse(), memory_stats.MaxBytesInUse()
    assert now.shape == most.shape == () and now.dtype == most.dtype == tf.int64
    now, most = value([now, most])
    assert 10**8 < now <= 1.5 * most, (now, most)


def case_small_modules():
    assert xla.estimator_model_fn(case_profiles) is case_profiles
    close(value(xla.compile(lambda a: a + 1, [tf.constant(1.0)])), [2.0])
    with jit.experimental_jit_scope():
        pass
    close(value(nccl.all_sum([tf.constant(1.0), tf.constant(2.0)])), [3, 3])
    close(value([nccl.all_max([tf.constant(1.0), tf.constant(2.0)])[0], nccl.reduce_sum([tf.constant(1.0)])]), [2, 1])
    dropped = value(nn.alpha_dropout(tf.random_normal([20000], seed=1), 0.8, seed=2))
    close([dropped.mean(), dropped.std()], [0, 1], 0.05)
    tfe = proxies.proxy("tensorflow.contrib.eager.python.tfe")
    assert tfe.run_test_in_graph_and_eager_modes is eager.run_test_in_graph_and_eager_modes
    assert eager.in_graph_mode() and not eager.executing_eagerly() and keras.layers.Dense
    assert checkpoint.CheckpointManager and saved_model.read_saved_model and all_reduce.build_ring_all_reduce
    assert autograph.convert and tensorboard.plugins.projector.ProjectorConfig
    config = tensorboard.plugins.projector.ProjectorConfig()
    config.embeddings.add().tensor_name = "e"
    with tempfile.TemporaryDirectory() as folder:
        with tf.summary.FileWriter(folder) as writer:
            tensorboard.plugins.projector.visualize_embeddings(writer, config)
        assert '"e"' in pathlib.Path(folder, "projector_config.pbtxt").read_text()


def case_strategies():
    assert distribute.OneDeviceStrategy("/cpu:0").num_replicas_in_sync == 1
    assert distribute.MirroredStrategy(num_gpus=2).num_replicas_in_sync == 1
    assert distribute.has_distribution_strategy() is False


def case_old_keras():
    model = keras.models.Sequential([keras.layers.Dense(1, input_shape=(2,))])
    assert old_keras.multi_gpu_model(model, gpus=2) is model
    model.compile(keras.optimizers.Adam(lr=0.1, decay=1e-3), "mse")
    x = np.ones((8, 2), np.float32)
    first = model.evaluate(x, x[:, :1], verbose=0)
    model.fit(x, x[:, :1], epochs=3, verbose=0)
    assert model.evaluate(x, x[:, :1], verbose=0) < first
    assert old_keras.image_dim_ordering() == "tf"
    policy = keras_policies.Policy("mixed_float16", loss_scale="dynamic")
    assert policy.compute_dtype == "float16" and keras_policies.global_policy()
    assert keras_policies.LossScaleOptimizer(keras.optimizers.SGD(0.1), 128.0).initial_scale == 128.0
    assert names()


def case_names_that_few_scripts_used_say_what_to_use():
    for name, instead in (
        ("integrate", "tfp.math.ode"),
        ("learn.preprocessing", "Tokenizer"),
        ("model_pruning.python.pruning", "tensorflow-model-optimization"),
        ("distributions.Poisson", "tensorflow-probability==0.23"),
        ("eager.python.saver", "tf.GradientTape"),
        ("learn.python.learn.estimators", "tf.estimator"),
        ("opt.AddSignOptimizer", "tf.train.AdamOptimizer"),
        ("opt.python.training.shampoo.ShampooOptimizer", "LARSOptimizer"),
        ("opt.PowerSignOptimizer", "tf.train.AdamOptimizer"),
    ):
        said = error_of(ImportError, proxies.proxy, f"tensorflow.contrib.{name}")
        assert "is not available under npu-run. Use " in said and instead in said, said


def case_alpha_dropout_that_keeps_all():
    assert list(value(nn.alpha_dropout([1.0, -2.0], 1.0))) == [1.0, -2.0]


def case_rows_that_shards_do_not_divide():
    cell = rnn.CoupledInputForgetGateLSTMCell(2, num_unit_shards=3)
    cell(tf.zeros([1, 3]), cell.zero_state(1, tf.float32))
    assert [var.shape[0] for var in tf.global_variables() if "W_" in var.name] == [2, 2, 1]
