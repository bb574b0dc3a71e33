"""`tf.contrib.slim`, `layers`, `framework`, `metrics`, `losses` and `quantize`."""

from __future__ import annotations

import tempfile

import numpy as np
import tensorflow.compat.v1 as tf

from tensorflow1_compat.contrib import framework, layers, losses, metrics, quantize, slim
from tests.tensorflow1_compat.contrib_cases.common import close, names, value

RANDOM = np.random.RandomState(0)
IMAGES = RANDOM.rand(2, 8, 8, 3).astype(np.float32)


def case_slim_network():
    with slim.arg_scope([slim.conv2d], normalizer_fn=slim.batch_norm, weights_regularizer=slim.l2_regularizer(0.01)):
        net = slim.conv2d(tf.constant(IMAGES), 4, [3, 3], scope="conv1")
        net = slim.repeat(net, 2, slim.separable_conv2d, 4, [3, 3], scope="conv2")
        net = slim.max_pool2d(net, [2, 2])
        net = slim.flatten(slim.avg_pool2d(net, [2, 2]))
        net = slim.fully_connected(slim.dropout(net, 0.5), 5, activation_fn=None, scope="logits")
    assert value(slim.softmax(net)).shape == (2, 5)
    assert {"conv1/weights", "conv1/BatchNorm/beta", "conv1/BatchNorm/moving_mean", "logits/biases",
            "conv2/conv2_1/depthwise_weights", "conv2/conv2_2/pointwise_weights"} <= set(names())  # fmt: skip
    assert len(slim.losses.get_regularization_losses()) == 1
    assert {var.op.name for var in slim.get_model_variables("conv1")} == {n for n in names() if n.startswith("conv1/")}
    assert slim.utils.last_dimension(net.shape) == 5


def case_slim_trains():
    labels = tf.one_hot([0, 1], 5)
    logits = slim.fully_connected(slim.flatten(tf.constant(IMAGES)), 5, activation_fn=None)
    slim.losses.softmax_cross_entropy(logits, labels)
    train = slim.learning.create_train_op(slim.losses.get_total_loss(), tf.train.GradientDescentOptimizer(0.1))
    with tempfile.TemporaryDirectory() as folder:
        last = slim.learning.train(
            train, f"{folder}/b", number_of_steps=20, log_every_n_steps=100, saver=tf.train.Saver()
        )
        assert last < np.log(5)
        path = tf.train.latest_checkpoint(f"{folder}/b")
        with tf.Graph().as_default(), tf.Session() as session:
            step = slim.get_or_create_global_step()
            slim.assign_from_checkpoint_fn(path, slim.get_variables_to_restore())(session)
            assert session.run(step) == 20


def case_slim_reads_examples():
    decoder = slim.tfexample_decoder.TFExampleDecoder(
        {"image/encoded": tf.FixedLenFeature([], tf.string), "image/format": tf.FixedLenFeature([], tf.string, "png"),
         "label": tf.FixedLenFeature([], tf.int64)},
        {"image": slim.tfexample_decoder.Image(shape=[2, 2, 3]), "label": slim.tfexample_decoder.Tensor("label")},
    )  # fmt: skip
    picture = np.arange(12, dtype=np.uint8).reshape(2, 2, 3)
    encoded = value(tf.image.encode_png(picture))
    features = {
        "image/encoded": tf.train.Feature(bytes_list=tf.train.BytesList(value=[encoded])),
        "label": tf.train.Feature(int64_list=tf.train.Int64List(value=[7])),
    }
    example = tf.train.Example(features=tf.train.Features(feature=features)).SerializeToString()
    with tempfile.TemporaryDirectory() as folder:
        with tf.python_io.TFRecordWriter(f"{folder}/a.tfrecord") as writer:
            writer.write(example)
        found = slim.dataset.Dataset(f"{folder}/a.tfrecord", tf.TFRecordReader, decoder, 1, {"image": "", "label": ""})
        image, label = slim.dataset_data_provider.DatasetDataProvider(found, shuffle=False).get(["image", "label"])
        with tf.train.MonitoredSession() as session:
            got = session.run([image, label])
    assert (got[0] == picture).all() and got[1] == 7


def case_slim_nets():
    with slim.arg_scope(slim.nets.resnet_v1.resnet_arg_scope()):
        block = slim.nets.resnet_v1.resnet_v1_block("b", base_depth=2, num_units=2, stride=2)
        net, _ = slim.nets.resnet_v1.resnet_v1(tf.constant(IMAGES), [block], 3, scope="r")
    assert value(net).shape == (2, 1, 1, 3) and "r/b/unit_1/bottleneck_v1/conv1/weights" in names()
    for net in ("alexnet", "inception", "overfeat", "resnet_utils", "resnet_v2", "vgg"):
        assert hasattr(slim.nets, net)


def case_layers():
    x = tf.constant(IMAGES)
    normed = layers.layer_norm(x)
    moments = value(tf.nn.moments(normed, [1, 2, 3]))
    close(moments[0], [0, 0], 1e-4)
    close(moments[1], [1, 1], 1e-3)
    assert names() == ["LayerNorm/beta", "LayerNorm/gamma"]
    close(value(tf.nn.moments(layers.instance_norm(x), [1, 2]))[0], np.zeros((2, 3)), 1e-4)
    layers.group_norm(tf.ones([2, 4, 4, 8]), groups=4)
    found = layers.fully_connected(tf.ones([2, 3]), 4, weights_initializer=tf.ones_initializer())
    close(value(found), np.full((2, 4), 3))
    assert layers.conv2d_transpose(x, 4, 3, 2).shape.as_list() == [2, 16, 16, 4]
    assert layers.conv3d(tf.ones([1, 4, 4, 4, 2]), 3, 3).shape.as_list() == [1, 4, 4, 4, 3]
    close(value(layers.l2_regularizer(0.5)(tf.constant([2.0, 2.0]))), 2.0)
    close(value(layers.l1_regularizer(0.5)(tf.constant([2.0, -2.0]))), 2.0)
    limit = np.sqrt(6 / 300)
    weights = value(tf.get_variable("x", [100, 200], initializer=layers.xavier_initializer()))
    assert abs(weights).max() <= limit and abs(weights).max() > 0.95 * limit


def case_embeddings_and_columns():
    ids = tf.constant([[1, 2], [1, 0]])
    found = layers.embed_sequence(ids, 5, 3, scope="e")
    again = layers.embed_sequence(ids, 5, 3, scope="e", reuse=True, unique=True)
    close(*value([found, again]))
    assert names() == ["e/embeddings"] and found.shape.as_list() == [2, 2, 3]
    table = tf.constant(RANDOM.rand(5, 3))
    close(*value([layers.embedding_lookup_unique(table, ids), tf.gather(table, ids)]))
    assert layers.bow_encoder(ids, 5, 3).shape.as_list() == [2, 3]
    keys = layers.sparse_column_with_keys("b", ["x", "y"])
    columns = [layers.real_valued_column("a", 2), layers.one_hot_column(keys)]
    dense = layers.input_from_feature_columns({"a": tf.ones([2, 2]), "b": tf.constant([["x"], ["y"]])}, columns)
    close(value(dense), [[1, 1, 1, 0], [1, 1, 0, 1]])


def case_optimize_loss():
    weights = tf.get_variable("w", initializer=4.0)
    step = tf.train.get_or_create_global_step()
    train = layers.optimize_loss(tf.square(weights), step, 0.1, "SGD", clip_gradients=1.0)
    with tf.Session() as session:
        session.run(tf.global_variables_initializer())
        session.run(train)
        close(session.run([weights, step]), [3.9, 1])
    assert "OptimizeLoss/learning_rate" in names()


def case_framework():
    variable = framework.model_variable("a/w", [2], initializer=tf.ones_initializer())
    framework.local_variable(3.0, name="local")
    assert framework.get_variables_by_name("w") == [variable] and framework.get_model_variables() == [variable]
    assert framework.get_variables("a") == [variable] and framework.get_name_scope() == ""
    assert framework.get_variables_to_restore(exclude=["a"]) == []
    assign, feeds = framework.assign_from_values({"a/w": np.array([5.0, 6.0])})
    with tf.Session() as session:
        session.run(tf.global_variables_initializer())
        session.run(assign, feeds)
        close(session.run(variable), [5, 6])
    close(value(framework.smart_cond(True, lambda: tf.constant(1), lambda: tf.constant(2))), 1)
    close(value(framework.with_shape([2], tf.constant([1.0, 2.0]))), [1, 2])
    close(value(framework.with_same_shape(tf.zeros([2]), tf.constant([1.0, 2.0]))), [1, 2])
    close(value(framework.reduce_sum_n([tf.ones([2]), tf.ones([3])])), 5)
    try:
        framework.with_shape([3], tf.constant([1.0, 2.0]))
    except ValueError as error:
        assert "with_shape" in str(error)
    else:
        raise AssertionError

    @framework.add_arg_scope
    def scaled(x, by=1):
        return x * by

    with framework.arg_scope([scaled], by=3):
        assert scaled(2) == 6
    fused = framework.fuse_op(
        tf.get_default_graph().as_graph_def(), ["a/w"], ["a/w/read"], [tf.float32], False, "fused", "Fused"
    )
    assert next(node for node in fused.node if node.name == "fused").input == ["a/w"]


def case_metrics_and_losses():
    for name, expected in (("streaming_accuracy", 0.5), ("streaming_mean_iou", None), ("streaming_precision", 0.5)):
        arguments = {"num_classes": 2} if name == "streaming_mean_iou" else {}
        found, update = getattr(metrics, name)(tf.constant([1, 1]), tf.constant([1, 0]), **arguments)
        with tf.Session() as session:
            session.run(tf.local_variables_initializer())
            session.run(update)
            got = session.run(found)
            close(got, 0.25 if expected is None else expected)
    close(value(metrics.accuracy(tf.constant([1, 0]), tf.constant([1, 1]))), 0.5)
    values, updates = metrics.aggregate_metric_map({"a": metrics.streaming_mean(tf.constant([1.0, 3.0]))})
    assert set(values) == set(updates) == {"a"}
    assert value(metrics.confusion_matrix([0, 1], [1, 1])).tolist() == [[0, 1], [0, 1]]
    close(value(losses.sigmoid_cross_entropy(tf.constant([[0.0]]), tf.constant([[1.0]]))), np.log(2))
    close(value(losses.mean_squared_error(tf.constant([1.0]), tf.constant([3.0]))), 4)
    assert len(losses.get_losses()) == 2
    embedded = tf.nn.l2_normalize(tf.constant(RANDOM.rand(4, 3), tf.float32), 1)
    assert value(losses.metric_learning.triplet_semihard_loss(tf.constant([0, 0, 1, 1]), embedded)) >= 0


def case_quantize():
    def network():
        net = slim.conv2d(tf.constant(IMAGES), 4, [3, 3], scope="conv")
        return slim.fully_connected(slim.flatten(net), 3, activation_fn=tf.nn.relu, scope="fc")

    logits = network()
    quantize.create_training_graph(quant_delay=0)
    train = tf.train.GradientDescentOptimizer(0.01).minimize(tf.reduce_sum(tf.square(logits - 1)))
    made = {"conv/weights_quant/min", "conv/weights_quant/max", "conv/act_quant/max", "fc/weights_quant/max"}
    assert made <= set(names())
    rounded = tf.get_default_graph().get_operation_by_name("conv/Conv2D").inputs[1]
    with tf.Session() as session, tempfile.TemporaryDirectory() as folder:
        session.run(tf.global_variables_initializer())
        for _ in range(3):
            session.run(train)
        values = session.run(rounded)
        assert len(np.unique(values)) <= 255
        assert not np.array_equal(values, session.run("conv/weights:0"))
        step = (values.max() - values.min()) / 254
        assert abs(values - session.run("conv/weights:0")).max() <= step
        path = tf.train.Saver().save(session, f"{folder}/m")
        with tf.Graph().as_default():
            out = network()
            quantize.create_eval_graph()
            with tf.Session() as other:
                tf.train.Saver().restore(other, path)
                assert np.isfinite(other.run(out)).all()


def case_quantize_waits():
    weights = tf.get_variable("l/w", initializer=RANDOM.rand(3, 3).astype(np.float32))
    with tf.name_scope("l/"):
        product = tf.matmul(tf.ones([1, 3]), weights)
    step = tf.train.get_or_create_global_step()
    quantize.experimental_create_training_graph(weight_bits=2, quant_delay=5)
    with tf.Session() as session:
        session.run(tf.global_variables_initializer())
        early = session.run(product)
        close(early, session.run(weights).sum(0, keepdims=True))
        session.run(tf.assign(step, 5))
        assert abs(session.run(product) - early).max() > 1e-3
