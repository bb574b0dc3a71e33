"""Estimators whose ranks keep something for themselves: their checkpoints are those of all ranks."""

from __future__ import annotations

import numpy as np
import pytest
import tensorflow as tf

from npu_bridge import collective, stages
from npu_bridge.estimator.npu.npu_config import NPURunConfig
from npu_bridge.estimator.npu.npu_estimator import NPUEstimator, NPUEstimatorSpec
from npu_bridge.estimator.npu.npu_helpers import npu_hooks_append, npu_keras_optimizer
from npu_bridge.estimator.npu.npu_optimizer import NPUDistributedOptimizer
from tests.goldens.two_layers import assert_same_bits
from tests.rank_pool import on_each_rank
from tests.ranks.ways import AtEnd

tf1 = tf.compat.v1
CHAINS = {
    "top-k": lambda: [stages.TopK(0.25)],
    "partial sync": lambda: [stages.PartialSync(4)],
    "in a window": lambda: [stages.Accumulate(2)],
}


def model_fn(features, labels, mode, params):
    kernel = tf1.get_variable("kernel", [8, 1], initializer=tf1.ones_initializer())
    bias = tf1.get_variable("bias", [1], initializer=tf1.zeros_initializer())
    loss = tf.reduce_mean(tf.square(tf.matmul(features, kernel) + bias - labels))
    inner = tf1.train.GradientDescentOptimizer(0.05)  # slots would be each rank's own in partial synchronisation
    optimizer = NPUDistributedOptimizer(inner, stages=CHAINS[params["chain"]]())
    train_op = optimizer.minimize(loss, tf1.train.get_or_create_global_step())
    return NPUEstimatorSpec(mode, loss=loss, train_op=train_op)


def input_fn(skipped):
    batches = np.random.RandomState(collective.current().rank).normal(size=[40, 4, 9]).astype(np.float32)
    return tf.data.Dataset.from_tensor_slices((batches[:, :, :8], batches[:, :, 8:])).skip(skipped)


def trained(chain, folder, batches, skipped=0, hooks=(), **interval):
    config = NPURunConfig(model_dir=folder, log_step_count_steps=None, save_summary_steps=0, **interval)
    at_end = AtEnd()
    estimator = NPUEstimator(model_fn, config=config, params={"chain": chain})
    estimator.train(lambda: input_fn(skipped).take(batches), [*hooks, at_end])
    return {name: at_end.values[name] for name in ("kernel:0", "bias:0")}


@pytest.mark.few_fast(1, "other stages save in the same way")
@pytest.mark.parametrize("chain", CHAINS)
@on_each_rank(2)
def test_a_training_that_goes_on_from_a_checkpoint_gives_the_same_bits(chain, tmp_path):
    """Stops in the middle of eight batches, inside of a window if there are windows."""
    stop = 3 if chain == "in a window" else 4
    whole = trained(chain, f"{tmp_path}/whole", 8, save_checkpoints_steps=2)
    trained(chain, f"{tmp_path}/resumed", stop, save_checkpoints_steps=2)
    resumed = trained(chain, f"{tmp_path}/resumed", 8 - stop, skipped=stop, save_checkpoints_steps=2)
    assert_same_bits(whole, resumed)


def stopped_in_the_middle(folder, interval):
    """On a rank: trains with an odd number of batches, so that the last window is not whole."""
    trained("in a window", folder, 3, **interval)


@pytest.mark.parametrize("interval", [{"save_checkpoints_steps": 100}, {"save_checkpoints_secs": 1000}])
def test_the_last_checkpoint_has_what_every_rank_keeps(on_ranks, interval, tmp_path):
    on_ranks(2, stopped_in_the_middle, str(tmp_path), interval)
    names = [name for name, _ in tf.train.list_variables(str(tmp_path))]
    (name,) = [name for name in names if "of_ranks" in name and "kernel" in name]
    rows = tf.train.load_variable(str(tmp_path), name)
    assert len(rows) == 2 and (rows[0] != rows[1]).any()


def own_saver(folder):
    """Trains on a rank; only rank 0 gets a saver."""
    savers = [tf.estimator.CheckpointSaverHook(folder, save_steps=2)] if collective.current().rank == 0 else []
    return trained("partial sync", folder, 5, hooks=savers, save_checkpoints_steps=2)


def own_saver_and_sync(folder):
    """Trains as `own_saver`, with the hook that comes before the saver."""
    savers = [stages.SyncBeforeSavingHook(5)]
    if collective.current().rank == 0:
        savers.append(tf.estimator.CheckpointSaverHook(folder, save_steps=5))
    return trained("partial sync", folder, 5, hooks=savers)


def test_a_saver_of_rank_0_alone_stops_nobody(on_ranks, tmp_path):
    first, second = on_ranks(2, own_saver, str(tmp_path))
    assert any((first[name] != second[name]).any() for name in first)  # five updates, two partitions: still apart


def test_a_saver_of_ones_own_has_the_hook_before_it(on_ranks, tmp_path):
    first, second = on_ranks(2, own_saver_and_sync, str(tmp_path))
    assert_same_bits(first, second)
    assert np.array_equal(first["kernel:0"], tf.train.load_variable(str(tmp_path), "kernel"))


@on_each_rank(2, gives=[0, 3])
def test_ranks_that_read_no_checkpoint_count_steps_from_that_of_rank_0(tmp_path):
    """Returns the steps with which two trainings began, of which rank 0 alone reads and writes the checkpoints."""
    started = []
    for last_step in (3, 6):
        with tf.Graph().as_default():
            features, labels = tf.ones([4, 8]), tf.zeros([4, 1])
            train_op = model_fn(features, labels, tf.estimator.ModeKeys.TRAIN, {"chain": "in a window"}).train_op
            hooks = [stages.SyncBeforeSavingHook(2), tf1.train.StopAtStepHook(last_step=last_step)]
            own = str(tmp_path) if collective.current().rank == 0 else None
            if own:
                hooks.append(tf.estimator.CheckpointSaverHook(own, save_steps=2))
            options = {"checkpoint_dir": own, "save_checkpoint_secs": None, "save_summaries_steps": None}
            with tf1.train.MonitoredTrainingSession(hooks=npu_hooks_append(hooks), **options) as session:
                step = tf1.train.get_global_step()
                started.append(session.run(step))
                while not session.should_stop():
                    session.run(train_op)
    if own:
        assert tf.train.load_variable(own, "global_step") == 6
    return started


@on_each_rank(2, gives=[1, 1])
def test_the_hook_of_one_training_serves_the_next_one():
    """Trains with a stage that needs the hook, and without one; returns the global steps."""
    hook, steps = stages.SyncBeforeSavingHook(1), []
    for chain in (CHAINS["partial sync"](), []):
        with tf.Graph().as_default():
            loss, step = tf1.get_variable("w", initializer=1.0) ** 2, tf1.train.get_or_create_global_step()
            optimizer = NPUDistributedOptimizer(tf1.train.GradientDescentOptimizer(0.1), stages=chain)
            train_op = optimizer.minimize(loss, step)
            with tf1.train.MonitoredTrainingSession(hooks=[hook]) as session:
                session.run(train_op)
                steps.append(session.run(step))
    return steps


def trained_in_turn(optimizers, syncs):
    """On a rank: weights of two lists that train in turn, with a number of `sync_all` in each turn."""
    with tf.Graph().as_default():
        weights = [tf1.get_variable(f"w{n}", [2], initializer=tf1.ones_initializer()) for n in range(4)]
        loss = tf.reduce_prod(tf.add_n(weights[:2]) * tf.add_n(weights[2:]) * (1.0 + collective.current().rank))
        inner = [tf1.train.MomentumOptimizer(0.01, 0.9) for _ in range(optimizers)]
        made = [NPUDistributedOptimizer(each, stages=[stages.PartialSync(1)]) for each in inner]
        train_ops = [made[0].minimize(loss, var_list=weights[:2]), made[-1].minimize(loss, var_list=weights[2:])]
        sync = [stages.sync_all(each) for each in made]
        with tf1.Session() as session:
            session.run(tf1.global_variables_initializer())
            for train_op in 3 * train_ops:
                session.run(train_op)
                for _ in range(syncs if train_op is train_ops[1] else 0):
                    session.run(sync)
            session.run(train_ops[0])
            return dict(zip("0123", session.run(weights)))


@pytest.mark.slow("six trainings on two ranks")
@pytest.mark.parametrize("optimizers", [1, 2])
@on_each_rank(2)
def test_lists_that_train_in_turn_keep_all_updates(optimizers):
    undisturbed, synced, synced_twice = [trained_in_turn(optimizers, syncs) for syncs in range(3)]
    assert_same_bits(undisturbed, synced)
    assert_same_bits(undisturbed, synced_twice)


@on_each_rank(2)
def test_a_second_sync_without_a_step_loses_no_weights():
    """Compares weights of this rank after one `sync_all` between two steps, and after two."""
    weights = []
    for syncs in (1, 2):
        three = [tf.Variable([1.0 + number] * 2) for number in range(3)]  # a step averages one of them
        optimizer = npu_keras_optimizer(tf.keras.optimizers.SGD(2.0**-10), stages=[stages.PartialSync(1)])
        for step in range(3):
            with tf.GradientTape() as tape:
                loss = tf.reduce_prod(three) * (1.0 + collective.current().rank)
            optimizer.minimize(loss, three, tape)
            for _ in range(syncs if step == 1 else 0):
                stages.sync_all(optimizer)
        weights.append([float(weight[0]) for weight in three])
    synced, synced_twice = weights
    assert synced == synced_twice
