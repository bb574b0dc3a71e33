"""`NPUStrategy` on two ranks: data is sharded, losses are not divided, gradients are the optimizer's business."""

from __future__ import annotations

import contextlib
import os

import numpy as np
import tensorflow as tf

from npu_bridge import collective
from npu_bridge.estimator.npu.npu_config import NPURunConfig
from npu_bridge.estimator.npu.npu_estimator import NPUEstimator
from npu_bridge.estimator.npu.npu_optimizer import NPUDistributedOptimizer, npu_distributed_optimizer_wrapper
from npu_bridge.estimator.npu.npu_strategy import NPUStrategy
from tests.rank_pool import on_each_rank
from tests.ranks.ways import AtEnd

tf1 = tf.compat.v1


def model_fn(features, labels, mode):
    """The gradient of a rank is its feature."""
    weight = tf1.get_variable("weight", [], initializer=tf1.zeros_initializer())
    loss = tf.reduce_sum(features) * weight
    optimizer = NPUDistributedOptimizer(tf1.train.GradientDescentOptimizer(1.0))
    return tf.estimator.EstimatorSpec(mode, loss=loss, train_op=optimizer.minimize(loss, tf1.train.get_global_step()))


@on_each_rank(2, by_rank=[([0, 2], 2, -4.0), ([1, 3], 2, -4.0)])
def test_two_ranks(tmp_path):
    """Returns the shards seen, the number of replicas, and the weight after two steps on 1 and 3."""
    rank = collective.current().rank
    with tf.Graph().as_default(), tf1.Session() as session:
        strategy = NPUStrategy()
        element = tf1.data.make_one_shot_iterator(
            strategy.experimental_distribute_dataset(tf.data.Dataset.range(5))
        ).get_next()
        seen = [int(session.run(element)) for _ in range(2)]
    return seen, strategy.num_replicas_in_sync, weight_after(tmp_path, rank, NPUStrategy())


def weight_after(folder, rank, strategy):
    config = NPURunConfig(model_dir=os.path.join(folder, f"rank_{rank}"), train_distribute=strategy)
    at_end = AtEnd()

    def input_fn():
        return tf.data.Dataset.from_tensors((float(1 + 2 * rank), 0.0)).repeat()

    NPUEstimator(model_fn, config=config).train(input_fn, steps=2, hooks=[at_end])
    return at_end.values["weight:0"]


@on_each_rank(2, gives=-4.0)
def test_a_strategy_of_one_device_that_is_left_in_a_script(tmp_path):
    """The strategy is that of a script which was once for several GPUs."""
    return weight_after(tmp_path, collective.current().rank, tf.distribute.MirroredStrategy(["/cpu:0"]))


@on_each_rank(2)
def test_functions_that_shard_by_their_input_context_get_the_rows_of_their_rank(tmp_path):
    """In a loop, and in an Estimator."""

    def rows(input_context):
        shard = tf.data.Dataset.range(6).shard(input_context.num_input_pipelines, input_context.input_pipeline_id)
        return shard.batch(input_context.get_per_replica_batch_size(4))

    def input_fn(input_context=None):
        return rows(input_context).map(lambda row: (tf.cast(row, tf.float32), 0.0))

    strategy, rank, at_end = NPUStrategy(), collective.current().rank, AtEnd()
    seen = [batch.numpy().tolist() for batch in strategy.distribute_datasets_from_function(rows)]
    assert seen == [[rank, rank + 2], [rank + 4]]
    own = os.path.join(tmp_path, f"rank_{rank}")
    config = NPURunConfig(model_dir=own, train_distribute=strategy, eval_distribute=strategy)
    estimator = NPUEstimator(model_fn, config=config)
    estimator.train(input_fn, hooks=[at_end])
    weight = at_end.values["weight:0"]
    assert weight == -(2 + 4) / 2 - (4 + 5) / 2
    if rank == 0:  # which evaluates all rows
        assert estimator.evaluate(input_fn, steps=1)["loss"] == weight * (0 + 1 + 2 + 3)


def fit(in_scope):
    """On a rank: the steps that `fit` has made in three epochs of four batches, and the weights."""
    with NPUStrategy().scope() if in_scope else contextlib.nullcontext():
        model = tf.keras.Sequential([tf.keras.layers.Dense(1, kernel_initializer="ones", input_shape=(1,))])
        model.compile(npu_distributed_optimizer_wrapper(tf.keras.optimizers.SGD(0.1)), "mse")
    rows = np.linspace(0.0, 1.0, 32, dtype=np.float32)[:, np.newaxis] + collective.current().rank
    model.fit(rows, 3.0 * rows, batch_size=8, epochs=3, shuffle=False, verbose=0)
    return int(model.optimizer.iterations), [weight.tolist() for weight in model.get_weights()]


def test_keras_trains_in_the_scope_as_without_a_strategy(on_ranks):
    without = on_ranks(2, fit, False)
    assert on_ranks(2, fit, True) == without and without[0] == without[1] and without[0][0] == 12
