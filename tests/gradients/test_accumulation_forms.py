"""Accumulation that all-reduces every batch, and with a loss scale of its own for every batch, on one rank."""

from __future__ import annotations

import tensorflow as tf

from npu_bridge import stages
from npu_bridge.amp.loss_scale import DynamicLossScaleManager
from npu_bridge.estimator.npu.npu_loss_scale_manager import ExponentialUpdateLossScaleManager
from npu_bridge.estimator.npu.npu_optimizer import NPUOptimizer
from tests.goldens.cases import GOLDENS
from tests.goldens.two_layers import OPTIMIZERS
from tests.goldens.ways import InGraph
from tests.refusing import refuses

tf1 = tf.compat.v1


def test_a_batch_that_is_left_out_leaves_every_bit_but_the_scale():
    training, fed, bad = InGraph(GOLDENS["boost"]), GOLDENS["boost"].problem.fed_to(0), 3
    training.train(fed[:bad])
    before = training.everything()
    training.train(fed[bad : bad + 1])
    after = training.everything()
    moved = {name for name in after if after[name].tobytes() != before[name].tobytes()}
    assert "loss_scale:0" in moved
    assert moved <= {"loss_scale:0", "good_steps:0", "bad_steps:0"}


def test_a_sparse_gradient_overflows_where_a_dense_one_does():
    """Its rows are finite while scaled, and so is the mean of the window; the sum of a batch is not."""
    with tf1.Graph().as_default(), tf1.Session() as session:
        table, sign = tf1.get_variable("table", [3, 1], use_resource=True), tf1.placeholder(tf.float32, [])
        rows = tf.IndexedSlices(tf.fill([2, 1], 1.5 * sign), tf.constant([1, 1]), tf.constant([3, 1]))
        manager = ExponentialUpdateLossScaleManager(2.0**127, 10, 1)
        inner = tf1.train.GradientDescentOptimizer(1.0)
        optimizer = NPUOptimizer(inner, manager, False, True, stages=[stages.Accumulate(2)])
        scaled = optimizer.compute_gradients(tf.reduce_sum(tf.gather(table, rows.indices) * rows.values), [table])
        assert isinstance(scaled[0][0], tf.IndexedSlices)
        update = optimizer.apply_gradients(scaled)
        session.run(tf1.global_variables_initializer())
        before = session.run(table)
        for number in (1.0, -1.0):
            session.run(update, {sign: number})
        assert session.run(table).tobytes() == before.tobytes()
        assert session.run(manager.get_loss_scale()) < 2.0**127


def test_what_the_forms_say_of_themselves():
    assert stages.Accumulate(4).get_config() == {"steps": 4, "reduction": "mean"}
    assert stages.Accumulate(4, exchange="batch").get_config() == {"steps": 4, "reduction": "mean", "exchange": "batch"}
    for made in (stages.Accumulate(4, "sum", loss_scale="batch"), stages.Accumulate(4, exchange="batch")):
        assert type(made).from_config(made.get_config()).get_config() == made.get_config()
    optimizer = NPUOptimizer(
        OPTIMIZERS["sgd"](), DynamicLossScaleManager(), True, True, stages=[stages.Accumulate(4, exchange="batch")]
    )
    text = stages.explain(optimizer, ranks=2)
    assert text.index("AllReduce") < text.index("OverflowCheck") < text.index("accumulate reduced")


@refuses(
    ValueError,
    ({"exchange": "step"}, ["exchange has an unknown value", "'window' or 'batch'", "'step'"]),
    ({"loss_scale": "step"}, ["loss_scale has an unknown value", "'step'"]),
    ({"exchange": "batch", "loss_scale": "window"}, ["loss_scale='batch'", "Leave loss_scale out"]),
)
def test_unknown_forms_are_refused(arguments):
    stages.Accumulate(2, **arguments)
