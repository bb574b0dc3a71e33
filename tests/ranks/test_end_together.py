"""Ranks with unequal numbers of batches end together, with the last step of the one that has fewest."""

from __future__ import annotations

import os

import numpy as np
import pytest
import tensorflow as tf

from npu_bridge import collective
from npu_bridge.estimator.npu.npu_config import NPURunConfig
from npu_bridge.estimator.npu.npu_estimator import NPUEstimator, NPUEstimatorSpec
from npu_bridge.estimator.npu.npu_hook import NPUBroadcastGlobalVariablesHook, SetIterationsVarHook
from npu_bridge.estimator.npu.npu_optimizer import KerasDistributeOptimizer, NPUDistributedOptimizer
from npu_bridge.session import EndTogether, EndTogetherCallback
from npu_bridge.session.end_together import with_has_next_flag
from tests.goldens.two_layers import assert_same_bits, in_graph
from tests.ranks.ways import AtEnd

tf1 = tf.compat.v1
_BATCHES = (7, 5)


def _dataset(batches=_BATCHES):
    """This rank's batches, of numbers of its own; as many as it has."""
    rank = collective.current().rank
    features = np.random.RandomState(rank).randn(2 * batches[rank], 3).astype(np.float32)
    return tf.data.Dataset.from_tensor_slices((features, features.sum(axis=1, keepdims=True))).batch(2)


def _loss(features, labels):
    kernel = tf1.get_variable("kernel", [3, 1], initializer=tf1.ones_initializer())
    return tf.reduce_mean(tf.square(tf.matmul(features, kernel) - 2.0 * labels))


def _train_op(features, labels):
    optimizer = NPUDistributedOptimizer(tf1.train.MomentumOptimizer(0.05, 0.9))
    return optimizer.minimize(_loss(features, labels), tf1.train.get_or_create_global_step())


def _by_estimator(folder):
    def model_fn(features, labels, mode):
        return NPUEstimatorSpec(mode, loss=tf.constant(0.0), train_op=_train_op(features, labels))

    at_end = AtEnd()
    config = NPURunConfig(model_dir=folder, save_checkpoints_steps=3)
    NPUEstimator(model_fn, config=config).train(_dataset, hooks=[EndTogether(), at_end])
    return at_end.values


@in_graph
def _by_monitored_session(folder):
    end, at_end = EndTogether(), AtEnd()
    train_op = _train_op(*end.next_of(_dataset()))
    hooks = [NPUBroadcastGlobalVariablesHook(0), end, at_end]
    saving = folder if collective.current().rank == 0 else None
    with tf1.train.MonitoredTrainingSession(checkpoint_dir=saving, hooks=hooks, save_checkpoint_steps=3) as session:
        while not session.should_stop():
            session.run(train_op)
    return at_end.values


@in_graph
def _by_plain_session(folder):
    end = EndTogether()
    train_op, is_over = _train_op(*end.next_of(_dataset())), False
    with tf1.Session() as session:
        session.run([tf1.global_variables_initializer(), tf1.tables_initializer()])
        while not is_over:
            _, is_over = session.run([train_op, end.is_last])
        if collective.current().rank == 0:
            tf1.train.Saver().save(session, os.path.join(folder, "model.ckpt"), global_step=5)
        return session.run({variable.name: variable for variable in tf1.global_variables()})


_WAYS = {"estimator": _by_estimator, "monitored": _by_monitored_session, "plain": _by_plain_session}


def _train(folder):
    return {way: train(os.path.join(folder, way.replace(" ", "_"))) for way, train in _WAYS.items()}


def test_a_training_ends_with_the_last_step_of_the_shortest_rank_and_saves_it(on_ranks, tmp_path):
    for way in _WAYS:
        (tmp_path / way).mkdir()
    first, second = on_ranks(2, _train, str(tmp_path))
    for way in _WAYS:
        assert_same_bits(first[way], second[way])
        assert first[way]["global_step:0"] == min(_BATCHES)
        np.testing.assert_array_equal(first[way]["kernel:0"], first["plain"]["kernel:0"])
        reader = tf.train.load_checkpoint(tf.train.latest_checkpoint(str(tmp_path / way)))
        assert reader.get_tensor("global_step") == min(_BATCHES)
        np.testing.assert_array_equal(reader.get_tensor("kernel"), first[way]["kernel:0"])


@in_graph
def test_a_run_that_does_not_train_ends_no_training():
    end = EndTogether()
    features, _ = end.next_of(_dataset())
    with tf1.train.MonitoredTrainingSession(hooks=[end]) as session:
        for _ in range(_BATCHES[0]):
            session.run(features)
        assert not session.should_stop()


def _fit(folder, steps_per_epoch):
    """Trains two epochs on a rank; returns counts of steps and epochs, the weights, and the weights saved last."""
    end = EndTogetherCallback()
    model = tf.keras.Sequential([tf.keras.layers.Dense(1, kernel_initializer="ones", input_shape=(3,))])
    model.compile(KerasDistributeOptimizer(tf.keras.optimizers.SGD(0.01)), "mse")
    file = os.path.join(folder, f"{collective.current().rank}.weights.h5")
    saving = tf.keras.callbacks.ModelCheckpoint(file, save_weights_only=True)
    data = end.look_ahead(_dataset())
    history = model.fit(data, epochs=2, steps_per_epoch=steps_per_epoch, verbose=0, callbacks=[saving, end])
    weights = model.get_weights()
    model.load_weights(file)
    return int(model.optimizer.iterations), len(history.epoch), weights, model.get_weights()


@pytest.mark.few_fast(1, "other numbers of batches")
@pytest.mark.parametrize("steps_per_epoch, steps, epochs", [(None, 10, 2), (4, 5, 2)])
def test_epochs_of_keras_end_with_the_last_step_of_the_shortest_rank(
    on_ranks, tmp_path, steps_per_epoch, steps, epochs
):
    answers = on_ranks(2, _fit, str(tmp_path), steps_per_epoch)
    assert [answer[:2] for answer in answers] == [(steps, epochs)] * 2
    for _, _, weights, saved in answers:
        for ours, of_rank_0, from_file in zip(weights, answers[0][2], saved):
            np.testing.assert_array_equal(ours, of_rank_0)
            np.testing.assert_array_equal(ours, from_file)


@in_graph
def _refusals():
    """Mistakes that cannot be corrected, each refused at once."""

    def refused(function, *arguments, **keywords):
        with pytest.raises(ValueError) as error:
            function(*arguments, **keywords)
        return str(error.value)

    dataset = tf.data.Dataset.range(3)
    model_fn, input_fn = (lambda features, mode: None), (lambda: dataset)
    loops = NPUEstimator(model_fn, config=NPURunConfig(model_dir="unused", iterations_per_loop=2))
    return [
        refused(EndTogether().next_of, tf1.data.make_one_shot_iterator(dataset).get_next()),
        refused(EndTogether().begin),
        refused(EndTogetherCallback().look_ahead, np.ones(3)),
        refused(EndTogetherCallback().on_train_begin),
        refused(loops.train, input_fn, hooks=[EndTogether()]),
    ]


def test_what_cannot_be_looked_ahead_is_refused():
    words = ("a tf.data.Dataset", "hook.next_of", "a tf.data.Dataset", "TF 1 graph", "iterations_per_loop=2")
    for text, word in zip(_refusals(), words):
        assert word in text, text


@in_graph
def test_a_loop_of_steps_in_a_monitored_session_is_refused():
    end, loops = EndTogether(), SetIterationsVarHook(2)
    train_op = tf.group(_train_op(*end.next_of(_dataset())), name="IterationOp")
    with pytest.raises(ValueError, match="each single batch of a rank.*got iterations_per_loop=2"):
        with tf1.train.MonitoredTrainingSession(hooks=[end, loops]) as session:
            session.run(train_op)


def test_looking_ahead_changes_no_element_and_goes_through_the_data_once():
    drawn = []

    def batches():
        for number in range(4):
            drawn.append(number)
            yield {"x": np.full([number + 1], number, np.float32)}, tf.sparse.from_dense([[number, 0]])

    spec = ({"x": tf.TensorSpec([None], tf.float32)}, tf.SparseTensorSpec([1, 2], tf.int32))
    dataset = tf.data.Dataset.from_generator(batches, output_signature=spec)
    looked = with_has_next_flag(dataset)
    assert looked.element_spec[0] == dataset.element_spec
    found = [(element[0]["x"].numpy().tolist(), int(element[1].shape[0]), bool(more)) for element, more in looked]
    assert found == [([float(number)] * (number + 1), 1, number < 3) for number in range(4)]
    assert drawn == [0, 1, 2, 3]
    assert not list(with_has_next_flag(tf.data.Dataset.range(0)))
