"""With tail optimisation, nothing waits for the last fragment but what is made of it: read from the graphs."""

from __future__ import annotations

import pathlib
import sys

import numpy as np
import pytest
import tensorflow as tf

from npu_bridge.estimator.npu.npu_loss_scale_manager import FixedLossScaleManager
from npu_bridge.estimator.npu.npu_optimizer import NPUOptimizer
from tests.rewrite.waiting import computed_from, is_update, nodes_of_graph, waiting_for
from tests.training import OPTIMIZERS, TwoLayers, in_graph

tf1 = tf.compat.v1
pytestmark = pytest.mark.ranks(2)

BERT = pathlib.Path(__file__).resolve().parents[2] / "examples" / "bert_pretrain"
# What counts steps comes after the step, as in the optimizers themselves.
COUNTERS = ("power", "global_step", "iter", "loss_scale", "good_steps", "bad_steps")


def weights(name, *shape):
    return tf1.get_variable(name, shape, initializer=tf1.random_normal_initializer(stddev=0.1), use_resource=True)


def chain():
    values = tf.ones([2, 10])
    for layer in range(30):
        values = tf.tanh(tf.matmul(values, weights(f"layer_{layer}", 10, 10)))
    return tf.reduce_mean(values)


def sparse_and_unused():
    model = TwoLayers()
    return model.loss + 0.0 * tf.reduce_sum(chain())


def shared():
    """One matrix is used first and last, as an embedding that is also the output."""
    matrix = weights("matrix", 10, 10)
    values = tf.tanh(tf.matmul(tf.ones([2, 10]), matrix))
    for layer in range(8):
        values = tf.tanh(tf.matmul(values, weights(f"layer_{layer}", 10, 10)))
    return tf.reduce_mean(tf.matmul(values, matrix, transpose_b=True))


def two_heads():
    trunk = tf.tanh(tf.matmul(tf.ones([2, 10]), weights("trunk", 10, 10)))
    heads = [tf.reduce_mean(tf.square(tf.matmul(trunk, weights(f"head_{number}", 10, 4)))) for number in range(2)]
    return tf.add_n(heads)


def convolution():
    images = tf.ones([2, 8, 8, 3])
    for layer, channels in enumerate((4, 4, 8)):
        images = tf.nn.relu(
            tf.nn.conv2d(images, weights(f"layer_{layer}", 3, 3, images.shape[-1], channels), 1, "SAME")
        )
    return tf.reduce_mean(tf.matmul(tf.reshape(images, [2, -1]), weights("out", 8 * 8 * 8, 5)))


def bert():
    sys.path.insert(0, str(BERT))
    try:
        from masking import feature_shapes
        from model import ModelSize, masked_language_model
    finally:
        sys.path.remove(str(BERT))
    size = ModelSize(
        vocab_size=50, hidden_size=16, num_layers=2, num_heads=2, ffn_size=32, max_positions=8, dropout=0.0
    )
    features = {name: tf.zeros([2, width], kind) for name, (kind, width) in feature_shapes(8).items()}
    return masked_language_model(features, size, training=True).loss


MODELS = (chain, sparse_and_unused, shared, two_heads, convolution, bert)


def random_model(random):
    """Layers of random widths, skips between them, now and then a matrix that was used before, and control edges."""
    width = int(random.randint(2, 12))
    values, used = [tf.ones([2, width])], []
    for layer in range(random.randint(2, 9)):
        source = values[random.randint(len(values))]
        fitting = [matrix for matrix in used if matrix.shape[0] == source.shape[-1]]
        if fitting and random.rand() < 0.3:
            matrix = fitting[random.randint(len(fitting))]
        else:
            matrix = weights(f"layer_{layer}", source.shape[-1], int(random.randint(2, 12)))
            used.append(matrix)
        with tf.control_dependencies([values[random.randint(len(values))]] if random.rand() < 0.3 else []):
            values.append(tf.tanh(tf.matmul(source, matrix)))
    return tf.add_n([tf.reduce_mean(tf.square(value)) for value in values[1:]])


@in_graph
def superfluous_waits(model, optimizer, is_tailing):
    """On a rank: updates that wait for the last fragment, those of them that are not made of it, and all updates."""
    loss = model() if callable(model) else random_model(np.random.RandomState(model))
    wrapped = NPUOptimizer(OPTIMIZERS[optimizer](), FixedLossScaleManager(8), True, True, is_tailing)
    wrapped.minimize(loss, tf1.train.get_or_create_global_step())
    nodes = nodes_of_graph(tf1.get_default_graph())
    transfers = [name for name, node in nodes.items() if node.kind == "HorovodGroupedAllreduce"]
    last = max(transfers, key=lambda name: int(name.split("_fragment_")[1].split("_")[0]))
    updates = {name for name, node in nodes.items() if is_update(node) and not is_counter(variable_of(node, nodes))}
    waiting = updates & waiting_for(nodes, [last])
    return sorted(waiting), sorted(waiting - computed_from(nodes, [last])), sorted(updates)


def variable_of(update, nodes):
    """The name of the variable an update writes, which may be handed in through switches."""
    node = nodes[update.data[0]]
    while node.kind in ("Switch", "RefSwitch", "Identity"):
        node = nodes[node.data[0]]
    return node.name


def is_counter(name):
    return any(word in name for word in COUNTERS)


@pytest.mark.parametrize("optimizer", ["momentum", "adam", "lamb"])
@pytest.mark.parametrize("model", MODELS, ids=lambda model: model.__name__)
def test_what_is_not_made_of_the_last_fragment_does_not_wait_for_it(on_ranks, model, optimizer):
    waiting, superfluous, updates = on_ranks(2, superfluous_waits, model, optimizer, True)[0]
    assert superfluous == []
    assert 0 < len(waiting) < len(updates)


def test_without_tail_optimisation_everything_waits(on_ranks):
    waiting, superfluous, updates = on_ranks(2, superfluous_waits, chain, "adam", False)[0]
    applied = [name for name in updates if "Apply" in name]
    assert set(applied) <= set(waiting) and len(superfluous) > 20


def many_superfluous_waits(seeds):
    """On a rank: the superfluous waits of random models."""
    return {seed: superfluous_waits(seed, "momentum", True)[1] for seed in seeds}


def test_random_models(on_ranks):
    found = on_ranks(2, many_superfluous_waits, range(40))[0]
    assert {seed: waits for seed, waits in found.items() if waits} == {}
