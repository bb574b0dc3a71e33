"""Batch normalisations that residual and dense blocks can do without, in Keras models and in TF 1 graphs."""

from __future__ import annotations

import numpy as np
import pytest
import tensorflow as tf

from npu_bridge import boost
from npu_bridge.boost import batch_norm_of_graphs
from npu_bridge.boost import batch_norm_patterns as patterns

# Layers of TensorFlow 1 warn each time that there are newer ones.
pytestmark = pytest.mark.filterwarnings("ignore:`tf.layers:UserWarning")
tf1 = tf.compat.v1
applications = tf.keras.applications
layers = tf.keras.layers


def norms_of(model):
    return [layer.name for layer in model.layers if isinstance(layer, layers.BatchNormalization)]


# Removed: of ResNet-50 two inner ones of 16 blocks and 4 of shortcuts; of MobileNetV2 the expansion's of 10 blocks that
# end in an addition; of DenseNet-121 the one between the convolutions of 6 + 12 + 24 + 16 blocks.
@pytest.mark.slow("networks of fifty layers")
@pytest.mark.parametrize(
    "make, removed, kept, of_kind, an_example",
    [
        (applications.ResNet50, 36, 17, patterns.RESIDUAL, "conv4_block1_0_bn"),
        (applications.MobileNetV2, 10, 42, patterns.INVERTED, "block_2_expand_BN"),
        (applications.DenseNet121, 58, 63, patterns.DENSE, "conv3_block12_1_bn"),
    ],
)
def test_known_networks_lose_the_expected_layers_and_train(make, removed, kept, of_kind, an_example):
    whole = make(weights=None, input_shape=(32, 32, 3), classes=4)
    thin, report = boost.less_batch_norm(whole)
    assert (len(report.removed), report.kept) == (removed, kept) == (len(whole.layers) - len(thin.layers), kept)
    assert set(report.removed.values()) == {of_kind} and an_example in report.removed
    assert norms_of(thin) == [name for name in norms_of(whole) if name not in report.removed]
    for layer in thin.layers:
        for mine, other in zip(layer.get_weights(), whole.get_layer(layer.name).get_weights()):
            np.testing.assert_array_equal(mine, other)
    thin.compile(tf.keras.optimizers.legacy.SGD(1e-4), loss="sparse_categorical_crossentropy", run_eagerly=True)
    before = [variable.numpy() for variable in thin.trainable_variables]
    images = np.random.default_rng(0).normal(size=(2, 32, 32, 3)).astype(np.float32)
    losses = [thin.train_on_batch(images, np.array([0, 3])) for _ in range(2)]
    assert np.all(np.isfinite(losses)) and losses[0] != losses[1]
    moved = [not np.array_equal(old, new) for old, new in zip(before, thin.trainable_variables)]
    assert np.mean(moved) > 0.9


def block(x, channels, layers_of_one=layers):
    """conv norm relu conv norm, with a shortcut through conv norm where the channels change."""
    y = layers_of_one.Conv2D(channels, 3, padding="same", use_bias=False)(x)
    y = layers_of_one.ReLU()(layers_of_one.BatchNormalization(name=f"inner_{channels}")(y))
    y = layers_of_one.BatchNormalization(name=f"last_{channels}")(layers_of_one.Conv2D(channels, 3, padding="same")(y))
    if x.shape[-1] != channels:
        x = layers_of_one.BatchNormalization(name=f"shortcut_{channels}")(layers_of_one.Conv2D(channels, 1)(x))
    return x, y


def test_basic_blocks_also_where_they_are_added_by_a_sign():
    image = tf.keras.Input([8, 8, 3])
    x, y = block(layers.ReLU()(layers.Conv2D(4, 3)(image)), 4)
    x, y = block(layers.ReLU()(x + y), 6)
    model = tf.keras.Model(image, [layers.ReLU()(layers.Add()([y, x])), y])  # the second output is read, too
    assert list(boost.less_batch_norm(model).report.removed) == ["inner_4"]
    model = tf.keras.Model(image, layers.ReLU()(layers.Add()([y, x])))
    thin, report = boost.less_batch_norm(model)
    assert list(report.removed) == ["inner_4", "inner_6", "shortcut_6"] and norms_of(thin) == ["last_4", "last_6"]
    assert "3 of 5 batch normalisations removed" in report.text()
    # The rest computes the same as the whole model if the removed ones do nothing.
    for name in report.removed:
        layer = model.get_layer(name)
        variance = np.full(layer.moving_variance.shape, 1.0 - layer.epsilon, np.float32)
        layer.set_weights([np.ones_like(variance), np.zeros_like(variance), np.zeros_like(variance), variance])
    images = np.random.default_rng(0).normal(size=(2, 8, 8, 3)).astype(np.float32)
    np.testing.assert_allclose(thin(images), model(images), rtol=1e-4, atol=1e-5)


class Subclassed(tf.keras.Model):
    def call(self, inputs):
        return inputs


def preactivated():
    image = tf.keras.Input([8, 8, 4])
    y = layers.Conv2D(4, 3, padding="same")(layers.ReLU()(layers.BatchNormalization()(image)))
    return tf.keras.Model(image, layers.Add()([image, y]))


@pytest.mark.parametrize(
    "make, reason",
    [
        (lambda: tf.keras.Sequential([layers.Dense(2, input_shape=[3])]), "Sequential"),
        (Subclassed, "Subclassed is not a functional model"),
        (preactivated, "its longer side is norm act conv"),
        (lambda: applications.VGG16(weights=None, input_shape=(32, 32, 3), classes=2), "no batch normalisation"),
    ],
    ids=["sequential", "subclassed", "preactivated", "VGG16"],
)
def test_other_models_are_left_alone_with_a_reason(make, reason):
    model = make()
    thin, report = boost.less_batch_norm(model)
    assert thin is model and not report.removed
    assert reason in report.text()


def test_what_is_no_model_is_refused():
    with pytest.raises(TypeError, match=r"got 3 \(int\)\. Pass the model"):
        boost.less_batch_norm(3)


# TF 1 graphs.


def normed(x, name, training):
    return tf1.layers.batch_normalization(x, training=training, name=name)


def residual_network(images, training):
    def conv(x, channels, size, name):
        return tf1.layers.conv2d(x, channels, size, padding="same", name=name)

    x = tf.nn.relu(normed(conv(images, 8, 3, "stem"), "stem_bn", training))
    y = tf.nn.relu(normed(conv(x, 4, 1, "conv_1"), "bn_1", training))  # a bottleneck
    y = tf.nn.relu(normed(conv(y, 4, 3, "conv_2"), "bn_2", training))
    y = normed(conv(y, 8, 1, "conv_3"), "bn_3", training)
    x = tf.nn.relu(x + y)
    y = tf.nn.relu(normed(conv(x, 12, 3, "conv_4"), "bn_4", training))  # a basic block with a shortcut
    y = normed(conv(y, 12, 3, "conv_5"), "bn_5", training)
    x = tf.nn.relu(tf.add(normed(conv(x, 12, 1, "projection"), "bn_projection", training), y))
    return tf1.layers.dense(tf.reduce_mean(x, [1, 2]), 3, name="head")


def inverted_network(images, training):
    def depthwise(x, name):
        kernel = tf1.get_variable(name, [3, 3, x.shape[-1], 1])
        return tf.nn.depthwise_conv2d(x, kernel, [1, 1, 1, 1], "SAME")

    x = normed(tf1.layers.conv2d(images, 4, 3, padding="same"), "stem_bn", training)
    for number, channels in enumerate([4, 6]):  # the second one ends in no addition
        y = tf.nn.relu6(normed(tf1.layers.conv2d(x, 16, 1, use_bias=False), f"expand_{number}", training))
        y = tf.nn.relu6(normed(depthwise(y, f"kernel_{number}"), f"depthwise_{number}", training))
        y = normed(tf1.layers.conv2d(y, channels, 1), f"project_{number}", training)
        x = x + y if channels == x.shape[-1] else y
    return tf1.layers.dense(tf.reduce_mean(x, [1, 2]), 3)


def dense_network(images, training):
    x = tf1.layers.conv2d(images, 4, 3, padding="same")
    for number in range(2):
        y = tf.nn.relu(normed(x, f"first_{number}", training))
        y = tf.nn.relu(normed(tf1.layers.conv2d(y, 8, 1), f"second_{number}", training))
        x = tf.concat([x, tf1.layers.conv2d(y, 2, 3, padding="same")], 3)
    return tf1.layers.dense(tf.reduce_mean(normed(x, "last", training), [1, 2]), 3)


@pytest.mark.few_fast(1, "other networks")
@pytest.mark.parametrize(
    "network, removed",
    [
        (residual_network, ["bn_1", "bn_2", "bn_4", "bn_projection"]),
        (inverted_network, ["expand_0"]),
        (dense_network, ["second_0", "second_1"]),
    ],
)
def test_graphs_lose_the_operators_their_variables_and_their_updates(network, removed, tmp_path):
    trained = {}
    for training in (True, False):
        with tf.Graph().as_default() as graph:
            tf1.set_random_seed(1)
            logits = network(tf.random.normal([4, 8, 8, 3], seed=3), training)
            before = {variable.op.name for variable in tf1.global_variables()}
            updates = len(tf1.get_collection(tf1.GraphKeys.UPDATE_OPS))
            report = boost.less_batch_norm(graph).report
            assert [name.split("/")[0] for name in report.removed] == removed
            left = {variable.op.name for variable in tf1.global_variables()}
            assert {name.split("/")[0] for name in before - left} == set(removed) and len(before - left) == 4 * len(
                removed
            )
            assert not {name.split("/")[0] for name in removed}.intersection(
                variable.op.name.split("/")[0] for variable in tf1.trainable_variables()
            )
            assert updates - len(tf1.get_collection(tf1.GraphKeys.UPDATE_OPS)) == (2 * len(removed) if training else 0)
            with tf1.Session() as session:
                saver = tf1.train.Saver()
                if not training:
                    saver.restore(session, trained["checkpoint"])
                    assert np.all(np.isfinite(session.run(logits)))
                    continue
                loss = tf.reduce_mean(tf.square(logits - 1.0))
                with tf.control_dependencies(tf1.get_collection(tf1.GraphKeys.UPDATE_OPS)):
                    train_op = tf1.train.GradientDescentOptimizer(0.05).minimize(loss)
                session.run(tf1.global_variables_initializer())
                metadata = tf1.RunMetadata()
                options = tf1.RunOptions(trace_level=tf1.RunOptions.FULL_TRACE)
                losses = [session.run([loss, train_op], options=options, run_metadata=metadata)[0] for _ in range(2)]
                assert np.all(np.isfinite(losses))
                run = {node.node_name for device in metadata.step_stats.dev_stats for node in device.node_stats}
                assert not run.intersection(report.removed) and any("/FusedBatchNorm" in name for name in run)
                trained["checkpoint"] = saver.save(session, str(tmp_path / "model"))


def test_a_variable_that_something_else_reads_stays(graph):
    with tf1.variable_scope("network"):
        residual_network(tf.random.normal([4, 8, 8, 3]), True)
    gamma, beta = (
        next(each for each in tf1.trainable_variables() if each.op.name == f"network/bn_1/{name}")
        for name in ("gamma", "beta")
    )
    tf1.losses.add_loss(tf.nn.l2_loss(gamma))
    assert len(boost.less_batch_norm(graph).report.removed) == 4
    assert any(each is gamma for each in tf1.trainable_variables())
    assert not any(each is beta for each in tf1.trainable_variables())


def test_a_graph_with_gradients_is_refused_and_one_with_a_fed_mode_left_alone(graph):
    images = tf.zeros([2, 8, 8, 3])
    residual_network(images, tf1.placeholder_with_default(True, []))
    report = boost.less_batch_norm(graph).report
    assert not report.removed and report.text().startswith("less_batch_norm leaves it unchanged: ")
    with tf.Graph().as_default() as other:
        tf.gradients(residual_network(tf.zeros([2, 8, 8, 3]), True), tf1.trainable_variables())
        with pytest.raises(ValueError, match="Call less_batch_norm between the network and compute_gradients"):
            boost.less_batch_norm(other)


def test_a_graph_with_dropout_and_summaries_loses_in_training_what_it_loses_in_evaluation():
    removed = []
    for training in (True, False):
        with tf.Graph().as_default() as graph:
            x = tf1.layers.conv2d(tf.random.normal([4, 8, 8, 3]), 4, 3, padding="same")
            y = tf.nn.relu(normed(tf1.layers.conv2d(x, 4, 3, padding="same"), "inner", training))
            if training:
                tf1.summary.histogram("y", y)
                tf1.summary.scalar("share_of_zeros", tf.nn.zero_fraction(y))
            y = tf1.layers.dropout(y, 0.5, training=training)
            x = x + normed(tf1.layers.conv2d(y, 4, 3, padding="same"), "last", training)
            removed.append(list(boost.less_batch_norm(graph).report.removed))
    assert removed[0] == removed[1] and [name.split("/")[0] for name in removed[0]] == ["inner"]


def test_dropouts_are_found_in_one_search_of_the_graph(graph, monkeypatch):
    value, searched = tf.ones([4]), []
    for _ in range(20):
        value = tf.where(value > 0.5, 2.0 * value, 0.0)
    tf.where(tf.random.uniform(tf.shape(value)) >= 0.5, value, 0.0)
    search = batch_norm_of_graphs.search
    monkeypatch.setattr(
        batch_norm_of_graphs, "search", lambda *given: (searched.append(op) or op for op in search(*given))
    )
    (kept,) = batch_norm_of_graphs._inputs_of_dropouts(graph.get_operations()).values()
    assert kept is value
    assert len(searched) == len(set(searched)) > 2
