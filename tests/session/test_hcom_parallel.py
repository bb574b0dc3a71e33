"""`hcom_parallel` on real ranks: the order of transfers changes, the numbers do not."""

from __future__ import annotations

import re

import pytest
import tensorflow as tf

from npu_bridge import collective
from npu_bridge.estimator.npu.npu_config import NPURunConfig
from npu_bridge.estimator.npu.npu_estimator import NPUEstimator
from npu_bridge.estimator.npu.npu_optimizer import NPUDistributedOptimizer
from npu_bridge.stages import TopK
from tests.goldens.two_layers import assert_same_bits
from tests.ranks.ways import AtEnd
from tests.session.models import dataset

tf1 = tf.compat.v1


def model_fn(features, labels, mode, params):
    initializer = tf1.random_normal_initializer(seed=3)
    first = tf1.get_variable("first", [4, 6], initializer=initializer)
    second = tf1.get_variable("second", [6, 1], initializer=initializer)
    table = tf1.get_variable("table", [6, 1], initializer=initializer)  # its gradient is sparse
    tf1.get_variable("unused", [1])  # and this one has none
    values = tf.matmul(tf.matmul(features, first), second) + tf.gather(table, [3])
    loss = tf.reduce_mean(tf.square(values - labels))
    optimizer = NPUDistributedOptimizer(tf1.train.AdamOptimizer(0.1), stages=params["stages"])
    train_op = optimizer.minimize(loss, tf1.train.get_global_step())
    return tf.estimator.EstimatorSpec(mode, loss=loss, train_op=train_op)


def train(folder, hcom_parallel, stages):
    """On a rank: the variables after five steps, and how many of the three gradients waited for both others."""
    rank = collective.current().rank
    held = []

    class CountHeldBack(AtEnd):
        def begin(self):
            operations = tf1.get_default_graph().get_operations()
            identities = [op for op in operations if re.search("(Allreduce|SparsifyingReduction)/Identity", op.name)]
            held.append(sum(len(op.control_inputs) > 1 for op in identities))

    config = NPURunConfig(model_dir=f"{folder}/{rank}", hcom_parallel=hcom_parallel, tf_random_seed=1)
    hook = CountHeldBack()
    estimator = NPUEstimator(model_fn, params={"stages": stages}, config=config)
    estimator.train(lambda: dataset().shard(2, rank), hooks=[hook], steps=5)
    return hook.values, held[0]


@pytest.mark.few_fast(1, "selected values wait in the same way")
@pytest.mark.parametrize("stages", [[], [TopK(0.25)]], ids=["all values", "selected values"])
def test_numbers_are_the_same_and_transfers_wait(on_ranks, tmp_path, stages):
    overlapping = on_ranks(2, train, str(tmp_path / "on"), True, stages)
    waiting = on_ranks(2, train, str(tmp_path / "off"), False, stages)
    assert [held for _, held in overlapping] == [0, 0]
    assert [held for _, held in waiting] == [3, 3]
    for (values, _), (others, _) in zip(waiting, overlapping):
        assert_same_bits(values, others)
