"""With tail optimisation, nothing waits for the last fragment but what is made of it: read from the graphs."""

from __future__ import annotations

import pathlib
import sys

import pytest
import tensorflow as tf

from npu_bridge.base import environment
from npu_bridge.estimator.npu.npu_loss_scale_manager import FixedLossScaleManager
from npu_bridge.estimator.npu.npu_optimizer import NPUOptimizer
from npu_bridge.session.tailing_hook import tail_optimization_report_of
from tests.goldens.two_layers import OPTIMIZERS, TwoLayers, in_graph
from tests.gradients.tailing.waiting import (
    computed_from,
    is_counter,
    is_update,
    nodes_of_graph,
    nodes_of_run,
    superfluous_waits,
    variable_of,
    waiting_for,
)
from tests.ranks.ways import WAYS, control_flow, open_session
from tests.transfers import sums_fragment

tf1 = tf.compat.v1
pytestmark = pytest.mark.ranks(2)

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


@pytest.mark.few_fast(1, "other optimizers")
@pytest.mark.parametrize("optimizer", ["momentum", "adam", "lamb"])
@pytest.mark.parametrize("model", MODELS, ids=lambda model: model.__name__)
def test_what_is_not_made_of_the_last_fragment_does_not_wait_for_it(on_ranks, model, optimizer):
    waiting, superfluous, updates = on_ranks(2, waits_for_last_fragment, model, optimizer, True)[0]
    assert superfluous == []
    assert 0 < len(waiting) < len(updates)


@in_graph
def transfers_that_wait(most):
    """On a rank: for each fragment's transfer, those of other fragments and the decision that it waits for."""
    with environment.set_variables_temporarily(lambda: {"NPU_TRANSFERS_IN_FLIGHT": str(most)}):
        wrapped = NPUOptimizer(
            OPTIMIZERS["sgd"](), FixedLossScaleManager(8), True, True, True, gradient_split_groups=[5, 10, 15, 20, 25]
        )
        wrapped.minimize(chain(), tf1.train.get_or_create_global_step())
    nodes = nodes_of_graph(tf1.get_default_graph())
    transfers = {
        int(name.split("_fragment_")[1].split("_")[0]): name
        for name, node in nodes.items()
        if node.kind == "HorovodGroupedAllreduce"
    }
    (decision,) = (name for name, node in nodes.items() if node.kind == "HorovodAllreduce")
    behind = {name: waiting_for(nodes, [name]) for name in (*transfers.values(), decision)}
    waits = {
        number: sorted(other for other, source in transfers.items() if other != number and name in behind[source])
        for number, name in transfers.items()
    }
    return waits, sorted(number for number, name in transfers.items() if name in behind[decision])


@pytest.mark.slow("for speed and not for numbers")
@pytest.mark.horovod("its operators are counted")
def test_as_many_transfers_are_under_way_as_asked_for_and_the_last_waits_for_the_decision(on_ranks):
    waits, after_decision = on_ranks(2, transfers_that_wait, 1)[0]
    assert waits == {number: list(range(number)) for number in range(6)} and after_decision == [5]
    waits, after_decision = on_ranks(2, transfers_that_wait, 3)[0]
    assert waits == {0: [], 1: [], 2: [], 3: [0], 4: [1], 5: [2]} and after_decision == [5]


def test_without_tail_optimisation_everything_waits(on_ranks):
    waiting, superfluous, updates = on_ranks(2, waits_for_last_fragment, chain, "adam", False)[0]
    applied = [name for name in updates if "Apply" in name]
    assert set(applied) <= set(waiting) and len(superfluous) > 20


@in_graph
def superfluous_waits_when_freed(model, way, is_classic):
    """On a rank: superfluous waits of the graph that was run after the pass, and what the pass says."""
    with control_flow(is_classic):
        loss = model()
        optimizer, _ = WAYS[way](OPTIMIZERS["adam"](), "none", "opt", True)
        train_op = optimizer.minimize(loss, tf1.train.get_or_create_global_step())
        start = tf1.global_variables_initializer()
    graph = tf1.get_default_graph()
    words = {op.outputs[0]: [1, 2, 2] for op in graph.get_operations() if op.type == "Placeholder"}
    options, metadata = tf1.RunOptions(output_partition_graphs=True), tf1.RunMetadata()
    with open_session(is_tailing=True) as session:
        session.run(start)
        session.run([train_op, loss], words, options=options, run_metadata=metadata)
    report = tail_optimization_report_of(graph)
    return superfluous_waits(nodes_of_run(metadata), [loss.op.name]), report.kept, list(report.freed)


@pytest.mark.horovod("the pass finds its all-reduces")
@pytest.mark.slow("test_tailing_pass.py has the pass")
@pytest.mark.parametrize("way", ["NPULossScaleOptimizer", "scale outside", "scale inside"])
@pytest.mark.parametrize("model", MODELS, ids=lambda model: model.__name__)
def test_of_graphs_that_others_have_built_too(on_ranks, model, way):
    is_classic = model in MODELS[::2]
    for superfluous, kept, freed in on_ranks(2, superfluous_waits_when_freed, model, way, is_classic):
        assert superfluous == [] and kept == {} and len(freed) == 1
