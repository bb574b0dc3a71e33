"""With tail optimisation, nothing waits for the last fragment but what is made of it: read from the graphs."""

from __future__ import annotations

import pathlib
import sys

import pytest
import tensorflow as tf

from npu_bridge.base import environment
from npu_bridge.estimator.npu.npu_loss_scale_manager import FixedLossScaleManager
from npu_bridge.estimator.npu.npu_optimizer import NPUOptimizer
from tests.goldens.two_layers import OPTIMIZERS, TwoLayers, in_graph
from tests.tailing.waiting import (
    computed_from,
    is_counter,
    is_update,
    nodes_of_graph,
    variable_of,
    waiting_for,
)
from tests.transfers import is_transfer, sums_fragment

tf1 = tf.compat.v1
BERT = pathlib.Path(__file__).resolve().parents[2] / "examples" / "bert_pretrain"


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


@in_graph
def waits_for_last_fragment(model, optimizer, is_tailing):
    """On a rank: updates that wait for the last fragment, those of them that are not made of it, and all updates."""
    wrapped = NPUOptimizer(OPTIMIZERS[optimizer](), FixedLossScaleManager(8), True, True, is_tailing)
    wrapped.minimize(model(), tf1.train.get_or_create_global_step())
    nodes = nodes_of_graph(tf1.get_default_graph())
    transfers = [name for name, node in nodes.items() if sums_fragment(name, node.kind)]
    last = max(transfers, key=lambda name: int(name.split("_fragment_")[1].split("_")[0]))
    updates = {name for name, node in nodes.items() if is_update(node) and not is_counter(variable_of(node, nodes))}
    waiting = updates & waiting_for(nodes, [last])
    return sorted(waiting), sorted(waiting - computed_from(nodes, [last])), sorted(updates)


@pytest.mark.few_fast(1, "other models and optimizers")
@pytest.mark.parametrize(
    ("model", "optimizer"), [*((model, "momentum") for model in MODELS), (chain, "adam"), (bert, "lamb")]
)
def test_what_is_not_made_of_the_last_fragment_does_not_wait_for_it(on_ranks, model, optimizer):
    waiting, superfluous, updates = on_ranks(2, waits_for_last_fragment, model, optimizer, True)[0]
    assert superfluous == []
    assert 0 < len(waiting) < len(updates)


@in_graph
def transfers_that_wait(most, bytes_at_once, groups):
    """On a rank: the other transfers that each transfer waits for, and those that wait for the decision.

    Also how many updates wait for the decision, and how many there are; each gradient has 400 bytes.
    """
    variables = {"NPU_TRANSFERS_IN_FLIGHT": str(most), "FUSION_TENSOR_SIZE": str(bytes_at_once)}
    with environment.set_variables_temporarily(lambda: variables):
        wrapped = NPUOptimizer(
            OPTIMIZERS["sgd"](), FixedLossScaleManager(8), True, True, True, gradient_split_groups=groups
        )
        wrapped.minimize(chain(), tf1.train.get_or_create_global_step())
    nodes = nodes_of_graph(tf1.get_default_graph())
    transfers = {
        int(name.split("_fragment_")[1].split("_")[0]): name
        for name, node in nodes.items()
        if sums_fragment(name, node.kind)
    }
    (decision,) = (name for name, node in nodes.items() if is_transfer(node.kind) and "decision" in name)
    behind = {name: waiting_for(nodes, [name]) for name in (*transfers.values(), decision)}
    waits = {
        number: sorted(other for other, source in transfers.items() if other != number and name in behind[source])
        for number, name in transfers.items()
    }
    updates = {name for name, node in nodes.items() if is_update(node) and "Apply" in name}
    return (
        waits,
        sorted(number for number, name in transfers.items() if name in behind[decision]),
        len(updates & behind[decision]),
        len(updates),
    )


@pytest.mark.horovod("its operators are counted")
def test_as_many_transfers_are_under_way_as_asked_for_and_the_last_waits_for_the_decision(on_ranks):
    waits, after_decision, waiting, updates = on_ranks(2, transfers_that_wait, 1, 4000, [5, 10, 15, 20, 25])[0]
    assert waits == {number: list(range(number)) for number in range(6)}
    assert after_decision == [5] and waiting == updates == 30
    waits, after_decision, *_ = on_ranks(2, transfers_that_wait, 3, 4000, [5, 10, 15, 20, 25])[0]
    assert waits == {0: [], 1: [], 2: [], 3: [0], 4: [1], 5: [2]} and after_decision == [5]


@pytest.mark.horovod("its operators are counted")
def test_a_large_last_fragment_does_not_wait_for_the_decision(on_ranks):
    for bytes_at_once, expected in ((400, [29]), (399, [])):
        _, after_decision, *_ = on_ranks(2, transfers_that_wait, 3, bytes_at_once, None)[0]
        assert after_decision == expected


def test_without_tail_optimisation_everything_waits(on_ranks):
    waiting, superfluous, updates = on_ranks(2, waits_for_last_fragment, chain, "adam", False)[0]
    applied = [name for name in updates if "Apply" in name]
    assert set(applied) <= set(waiting) and len(superfluous) > 20
