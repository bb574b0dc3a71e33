"""`tf.contrib.slim` in trainings, and rounding that begins late (`quantize`)."""

from __future__ import annotations

import tempfile

import numpy as np
import tensorflow.compat.v1 as tf

from tensorflow1_compat.contrib import layers, quantize, slim
from tests.tensorflow1_compat.contrib_cases.common import close, names, value

RANDOM = np.random.RandomState(0)
IMAGES = RANDOM.rand(2, 8, 8, 3).astype(np.float32)


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


def case_embeddings_start_as_small_as_the_number_of_ids_asks_for():
    ids, same = (layers.sparse_column_with_integerized_feature(name, 10000) for name in ("ids", "same"))
    columns = [layers.embedding_column(ids, 4), *layers.shared_embedding_columns([ids, same], 4)]
    features = {name: tf.constant([[1]], tf.int64) for name in ("ids", "same")}
    for column in columns[:2]:
        layers.input_from_feature_columns(features, [column])
    for table in value(tf.trainable_variables()):
        assert table.shape == (10000, 4) and 0.008 < table.std() < 0.009  # a normal, cut at two deviations of 0.01


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
