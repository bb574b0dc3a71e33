"""`GlobalBatches` in a training that resumes from a checkpoint of one without it."""

from __future__ import annotations

import contextlib
import functools

import numpy as np
import pytest
import tensorflow as tf

from npu_bridge.npu_init import ExponentialUpdateLossScaleManager, NPUOptimizer, npu_keras_optimizer
from npu_bridge.session import GlobalBatches, ResumableLoop, ResumeCallback, updates_dealt
from npu_bridge.session.elastic import global_batches

X = np.random.RandomState(0).randn(60, 4).astype("f")
Y = X.sum(1, keepdims=True)
BATCHES = GlobalBatches(rows=60, batch=8, micro=4, seed=1)


def train_session(folder, stages, last):
    """Trains up to a step, as a process that resumes from the folder's checkpoint; returns the updates dealt before."""
    dealt = updates_dealt(folder)
    with tf.Graph().as_default():
        step = tf.compat.v1.train.get_or_create_global_step()
        features, labels = tf.compat.v1.data.make_one_shot_iterator(BATCHES.dataset((X, Y), folder)).get_next()
        weights = tf.compat.v1.get_variable("w", [4, 1])
        loss = tf.reduce_mean((tf.matmul(features, weights) - labels) ** 2)
        train = NPUOptimizer(tf.compat.v1.train.AdamOptimizer(), stages=stages).minimize(loss, step)
        hooks = [tf.compat.v1.train.StopAtStepHook(last_step=last)]
        with tf.compat.v1.train.MonitoredTrainingSession(checkpoint_dir=folder, hooks=hooks) as session:
            while not session.should_stop():
                session.run(train)
    return dealt


def test_a_count_that_a_checkpoint_lacks_goes_on_from_its_steps(tmp_path):
    folder = str(tmp_path)
    assert train_session(folder, [], 7) == 0
    assert train_session(folder, BATCHES.stages(), 12) == 7
    assert train_session(folder, BATCHES.stages(), 15) == 12
    assert updates_dealt(folder) == 15


@pytest.mark.parametrize("has_two", [False, True])
def test_lists_of_variables_that_are_trained_on_one_batch_count_it_once(tmp_path, has_two):
    with tf.Graph().as_default():
        optimizers = [
            NPUOptimizer(tf.compat.v1.train.AdamOptimizer(), stages=BATCHES.stages(), name=name) for name in "ab"
        ]
        trains = []
        with contextlib.nullcontext() if has_two else pytest.raises(ValueError, match=r"optimizer with .* each list"):
            for number, name in enumerate("uv"):
                weights = tf.compat.v1.get_variable(name, [4, 1])
                optimizer = optimizers[number if has_two else 0]
                trains.append(optimizer.minimize(tf.reduce_sum(weights**2), var_list=[weights]))
        with tf.compat.v1.Session() as session:
            session.run(tf.compat.v1.global_variables_initializer())
            for _ in range(3 * BATCHES.batches_per_update):
                session.run(trains)
            tf.compat.v1.train.Saver().save(session, str(tmp_path / "model"))
    assert updates_dealt(str(tmp_path)) == 3


def train_keras(file, stages, updates):
    """Makes so many more updates from what the file holds; gives the updates dealt before and after."""
    model = tf.keras.Sequential([tf.keras.layers.Input([4]), tf.keras.layers.Dense(1)])
    model.compile(npu_keras_optimizer(tf.keras.optimizers.Adam(), stages=stages), loss="mse")
    resume = ResumeCallback(file, every_n_steps=100)
    resume.restore(model)
    before = updates_dealt(model)
    runs = updates * (BATCHES.batches_per_update if stages else 1)
    model.fit(BATCHES.dataset((X, Y), model), steps_per_epoch=runs, callbacks=[resume], verbose=0)
    return before, updates_dealt(model)


def train_loop(family, folder, stages, updates):
    """The same in a loop of one's own, with the folder of its checkpoints."""
    model = tf.keras.Sequential([tf.keras.layers.Input([4]), tf.keras.layers.Dense(1)])
    optimizer = npu_keras_optimizer(family.Adam(), stages=stages)
    loop, before = ResumableLoop(folder, model, optimizer), updates_dealt(folder)
    for _ in loop.until(before + updates):
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(model(X) ** 2)
        optimizer.minimize(loss, model.trainable_variables, tape=tape)
    return before, updates_dealt(folder)


TRAIN = {
    "fit": train_keras,
    "loop": functools.partial(train_loop, tf.keras.optimizers),
    "loop, legacy": functools.partial(train_loop, tf.keras.optimizers.legacy),
}


@pytest.mark.parametrize("way", TRAIN)
def test_a_count_that_a_save_of_keras_lacks_goes_on_from_its_steps(tmp_path, way):
    place = str(tmp_path / "model.keras")
    assert TRAIN[way](place, [], 7) == (0, 7)
    assert TRAIN[way](place, BATCHES.stages(), 5) == (7, 12)
    assert TRAIN[way](place, BATCHES.stages(), 3) == (12, 15)


def test_the_second_fit_on_a_dataset_has_the_rows_of_the_next_updates():
    model = tf.keras.Sequential([tf.keras.layers.Input([4]), tf.keras.layers.Dense(1)])
    model.compile(npu_keras_optimizer(tf.keras.optimizers.Adam(), stages=BATCHES.stages()), loss="mse")
    rows, numbers = BATCHES.dataset((X, Y), model), BATCHES.indices(model)
    expected = [*BATCHES.indices().take(5)]
    for update in range(2):
        np.testing.assert_array_equal(next(iter(numbers)), expected[update * BATCHES.batches_per_update])
        model.fit(rows, steps_per_epoch=BATCHES.batches_per_update, verbose=0)


def test_each_epoch_has_an_order_of_its_own():
    one, other, again = (GlobalBatches(rows=40, batch=8, seed=seed)._permutation_of_epoch for seed in (1, 2, 1))
    orders = [one(0), one(1), other(0)]
    assert all(sorted(order) == list(range(40)) for order in orders)
    assert len({tuple(order) for order in orders}) == 3 and tuple(again(1)) == tuple(orders[1])


def test_a_share_that_weighs_more_is_no_overflow_where_its_batches_are_none():
    """Of three micro-batches, the first of two ranks has two, whose mean counts 4/3; here it is alone."""
    share = global_batches._RankShare(3, 2, 0)
    assert (share.runs, share.own, share.weight) == (2, 2, 4 / 3)
    with tf.Graph().as_default(), tf.compat.v1.Session() as session:
        weight = tf.compat.v1.get_variable("w", [], initializer=tf.compat.v1.zeros_initializer())
        manager = ExponentialUpdateLossScaleManager(2.0**127, 100, 1)
        inner = tf.compat.v1.train.GradientDescentOptimizer(1.0)
        stages = [global_batches._AccumulateShares(share)]
        train = NPUOptimizer(inner, manager, is_loss_scale=True, stages=stages).minimize(1.9 * weight)
        session.run(tf.compat.v1.global_variables_initializer())
        for _ in range(2):
            session.run(train)
        assert session.run(weight) == np.float32(-1.9) * np.float32(4 / 3)
        assert session.run(manager.get_loss_scale()) == 2.0**127
