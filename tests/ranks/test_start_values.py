"""Ranks that start from different values still train one model: the one that rank 0 starts from."""

from __future__ import annotations

import contextlib
import itertools

import numpy as np
import pytest
import tensorflow as tf

from npu_bridge import collective
from npu_bridge.base.tf_internals import keras3
from npu_bridge.base.tf_internals.names import HAS_ESTIMATORS
from npu_bridge.collective.checks.agreement import RanksDisagreeError
from npu_bridge.estimator.npu.npu_hook import NPUBroadcastGlobalVariablesHook, broadcast_global_variables
from npu_bridge.estimator.npu.npu_optimizer import (
    KerasDistributeOptimizer,
    NPUDistributedOptimizer,
    NPUOptimizer,
    npu_distributed_optimizer_wrapper,
)
from npu_bridge.estimator.npu.npu_saver import NPUSaver
from npu_bridge.gradients.first_step import start_values
from npu_bridge.hccl import hccl_ops
from npu_bridge.npu_init import npu_callbacks_append, npu_keras_optimizer
from tests.goldens.two_layers import as_built_by_many, in_graph
from tests.once import lines_said
from tests.rank_pool import on_each_rank
from tests.ranks.ways import RATE, TRAINERS, momentum, slow_scale, started_session

tf1 = tf.compat.v1


def _variables(use_resource=True):
    """As many variables as ranks at least, that start as the rank and position say."""
    rank = collective.current().rank
    return [
        tf1.get_variable(f"v{number}", initializer=tf.fill([2], 10.0 * rank + number), use_resource=use_resource)
        for number in range(4)
    ]


def _loss(variables):
    """With the gradient 1, 2, ... on ranks 0, 1, ..."""
    return tf.add_n(list(map(tf.reduce_sum, variables))) * (1.0 + collective.current().rank)


def _expected(size, steps):
    """Returns the values of all ranks after some steps from the values of rank 0."""
    return [[number - steps * RATE * (size + 1) / 2] * 2 for number in range(4)]


def stepped_without_an_input():
    """Broadcasts before a function has made the variables; returns the lines that are logged."""
    keras = keras3.load_keras3("this test")
    model = keras.Sequential([keras.layers.Dense(1)])
    optimizer = npu_keras_optimizer(keras.optimizers.SGD(0.1))
    hccl_ops.broadcast(model.variables, 0)

    @tf.function
    def step():
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(model(tf.ones([2, 2])))
        optimizer.apply(tape.gradient(loss, model.trainable_variables), model.trainable_variables)

    with lines_said() as lines:
        step()
    return [line for line in lines if "can start from different values" in line]


@pytest.mark.skipif(HAS_ESTIMATORS, reason="Keras 3 comes with TensorFlow 2.16 and later")
def test_a_model_without_weights_is_to_be_built_before_its_broadcast(on_ranks):
    said, of_rank_1 = on_ranks(2, stepped_without_an_input)
    assert len(said) == 1 and "Begin the model with an Input or call model.build(shape). Then add" in said[0], said
    assert of_rank_1 == []


@in_graph
def trained_in_a_graph(trainer, use_resource):
    """On a rank: values after two steps, what was said, and how many nodes the first step added."""
    variables = _variables(use_resource)
    train_op = TRAINERS[trainer](_loss(variables), variables)
    with lines_said(start_values.__name__) as lines, tf1.Session(config=as_built_by_many()) as session:
        session.run(tf1.global_variables_initializer())
        tf1.get_default_graph().finalize()
        for _ in range(2):
            session.run(train_op)
        return np.array(session.run(variables)).tolist(), lines


@pytest.mark.few_fast(1, "the same on three ranks")
@pytest.mark.parametrize("size", [2, 3])
@on_each_rank("size")
def test_ranks_that_start_differently_in_a_graph_train_one_model_and_rank_0_says_so(size):
    ranks = collective.current()
    for trainer, use_resource in itertools.product(TRAINERS, (True, False)):
        if trainer == "sharded" and not ranks.runs_can_differ:  # what its slots need
            continue
        if trainer == "Keras inside" and not use_resource:  # it takes no others
            continue
        values, lines = trained_in_a_graph(trainer, use_resource)
        assert values == _expected(size, 2), trainer
        assert len(lines) == (ranks.rank == 0), f"{trainer}: {lines}"
        for line in lines:
            assert "different values of v0:0, v1:0, v2:0 and 1 more; now all ranks have the values of rank 0" in line
            assert line.endswith(start_values._IN_GRAPH + ".")


@pytest.mark.few_fast(1, "other ways to broadcast")
@pytest.mark.parametrize("how", ["hook", "op", "collective"])
@on_each_rank(2)
@in_graph
def test_a_script_that_broadcasts_hears_nothing(how):
    variables = _variables()
    train_op = TRAINERS["loss scale"](_loss(variables), variables)
    with lines_said(start_values.__name__) as lines:
        if how == "hook":
            with tf1.train.MonitoredTrainingSession(hooks=[NPUBroadcastGlobalVariablesHook(0)]) as session:
                session.run(train_op)
                values = session.run(variables)
        else:
            together = broadcast_global_variables(0) if how == "op" else hccl_ops.broadcast(variables, 0)
            with started_session() as session:
                session.run(together)
                session.run(train_op)
                values = session.run(variables)
    assert np.array(values).tolist() == _expected(2, 1) and lines == []


class _HasItsOwnOptimizer(tf.keras.Sequential):
    """A model with an optimizer that Keras does not know, as a GAN has two."""

    def compile(self, optimizer, loss):
        super().compile(loss=loss)
        self.own_optimizer = optimizer

    def train_step(self, data):
        with tf.GradientTape() as tape:
            loss = self.compute_loss(y=data[1], y_pred=self(data[0]))
        self.own_optimizer.minimize(loss, self.trainable_variables, tape=tape)
        return {"loss": loss}


def fitted_without_an_input(callbacks, kind):
    """A model whose variables its first batch makes, with other values on each rank; returns what is said."""
    rank = collective.current().rank
    model = kind([tf.keras.layers.Dense(1, kernel_initializer=tf.keras.initializers.Constant(rank + 1.0))])
    model.compile(npu_keras_optimizer(tf.keras.optimizers.SGD(0.0), slow_scale()), loss="mse")
    with lines_said(start_values.__name__) as lines:
        data = tf.data.Dataset.from_tensors(([[1.0]], [[1.0]]))
        model.fit(data, verbose=0, callbacks=npu_callbacks_append() if callbacks else [])
    return lines, model.weights[0].numpy().item()


@pytest.mark.few_fast(1, "the other way of `fit`")
@pytest.mark.parametrize(
    "callbacks, kind",
    [(True, _HasItsOwnOptimizer), (True, tf.keras.Sequential), (False, tf.keras.Sequential)],
)
def test_who_has_the_callback_is_not_told_to_add_it(on_ranks, callbacks, kind):
    (lines, weight), *others = on_ranks(2, fitted_without_an_input, callbacks, kind)
    assert bool(lines) != callbacks and weight == 1.0, lines
    assert others == [([], 1.0)]


@on_each_rank(2, gives=_expected(2, 1))
@in_graph
def test_ranks_that_start_from_different_checkpoints_train_one_model(tmp_path):
    """Initializers are tensors then."""
    prefix = f"{tmp_path}/of_rank_{collective.current().rank}"
    with tf.Graph().as_default(), tf1.Session() as session:
        saver = tf1.train.Saver(_variables(use_resource=False))
        session.run(tf1.global_variables_initializer())
        saver.save(session, prefix)
    variables = _variables(use_resource=False)
    tf1.train.init_from_checkpoint(prefix, {variable.op.name: variable for variable in variables})
    train_op = NPUDistributedOptimizer(momentum()).minimize(_loss(variables), var_list=variables)
    with started_session() as session:
        session.run(train_op)
        return np.array(session.run(variables)).tolist()


SHARDED = pytest.param(2, "sharded", marks=pytest.mark.horovod("slots of other ranks cannot be saved without it"))


@pytest.mark.few_fast(1, "other variables take the same way")
@pytest.mark.parametrize(("size", "trainer"), [SHARDED, (3, "loss scale")])
@on_each_rank("size")
@in_graph
def test_what_rank_0_alone_has_restored_all_ranks_go_on_from(tmp_path, size, trainer):
    """Weights, slots, the step and the loss scale with its counters are as if the training had never been stopped."""
    ranks = collective.current()
    step = tf1.train.get_or_create_global_step()
    variables = [tf1.get_variable(f"v{number}", initializer=tf.fill([2], 1.0 * number)) for number in range(4)]
    inner = tf1.train.MomentumOptimizer(RATE, 0.5)
    if trainer == "sharded":
        optimizer = NPUDistributedOptimizer(inner, True)
    else:
        optimizer = NPUOptimizer(inner, slow_scale(), True, True, True)
    train_op = optimizer.minimize(_loss(variables), step, variables)
    saver = NPUSaver()  # on every rank, as slots of others may be in rank 0's checkpoint
    slots = [optimizer.get_slot(variable, "momentum") for variable in variables]
    followed = [
        *variables,
        step,
        *[slot for slot in slots if slot is not None],
        *tf1.get_collection("npu_bridge/loss_scale_state"),
    ]
    with started_session() as session:
        for _ in range(3):
            session.run(train_op)
        saver.save(session, f"{tmp_path}/model")
        session.run(train_op)
        expected = [value.tolist() for value in session.run(followed)]
    with lines_said(start_values.__name__) as lines, started_session() as session:
        if ranks.rank == 0:
            saver.restore(session, f"{tmp_path}/model")
        session.run(train_op)
        values = [value.tolist() for value in session.run(followed)]
    assert values == expected and 4 in values
    assert len(lines) == (ranks.rank == 0)


@on_each_rank(2, gives=[0.5 * 1 + 1.5] * 2)
def test_slots_are_compared_in_sessions_that_run_outside_the_block_of_their_graph():
    """Returns a slot that starts with 1 on rank 0 and 2 on rank 1, after a step with the mean gradient 1.5."""
    with tf.Graph().as_default() as graph:
        variables = _variables()
        optimizer = NPUDistributedOptimizer(tf1.train.MomentumOptimizer(RATE, 0.5))
        train_op = optimizer.minimize(_loss(variables), var_list=variables)
        slot, started = optimizer.get_slot(variables[0], "momentum"), tf1.global_variables_initializer()
        differing = tf1.assign(slot, tf.ones([2]) + collective.current().rank)
    with contextlib.closing(tf1.Session(graph=graph)) as session:
        for operation in (started, differing, train_op):
            session.run(operation)
        return session.run(slot).tolist()


@on_each_rank(2, gives=(64.0, 1, 0))
def test_the_scale_of_a_manager_made_eagerly_starts_alike():
    """Rank 0 alone has set the scale."""
    manager = slow_scale()
    with tf.Graph().as_default():
        variables = _variables()
        optimizer = NPUOptimizer(momentum(), manager, True, True, True)
        train_op = optimizer.minimize(_loss(variables), var_list=variables)
        with started_session() as session:
            if collective.current().rank == 0:
                manager.set_loss_scale(64.0)
            session.run(train_op)
            return manager.get_state()


def fitted(generation, how, is_eager):
    """On a rank: weights after two batches of `fit` and what was said; the model starts as the rank says."""
    ranks = collective.current()
    optimizers = tf.keras.optimizers.legacy if generation == "legacy" else tf.keras.optimizers
    stock = optimizers.SGD(RATE, momentum=0.5)
    optimizer = {
        "wrapper": lambda: KerasDistributeOptimizer(stock),
        "loss scale": lambda: npu_keras_optimizer(stock, loss_scale_manager=slow_scale()),
        "in place": lambda: npu_distributed_optimizer_wrapper(stock),
    }[how]()
    model = tf.keras.Sequential([tf.keras.layers.Dense(1, kernel_initializer="ones", input_shape=[2])])
    model.layers[0].kernel.assign_add(tf.fill([2, 1], 10.0 * ranks.rank))
    model.compile(optimizer, loss=lambda y, out: tf.reduce_mean(out) * (1.0 + ranks.rank), run_eagerly=is_eager)
    with lines_said(start_values.__name__) as lines:
        model.fit(tf.ones([4, 2]), tf.zeros([4, 1]), batch_size=2, verbose=0)
    return [weight.tolist() for weight in model.get_weights()], lines


# The mean gradient is 1.5; the second of two steps with momentum 0.5 goes 1.5 times as far.
_FITTED = [[[1 - RATE * 1.5 * 2.5]] * 2, [-RATE * 1.5 * 2.5]]


@pytest.mark.slow("those of a graph are fast")
@pytest.mark.parametrize("generation", ["legacy", "current"])
@pytest.mark.parametrize("how", ["wrapper", "loss scale", "in place"])
@pytest.mark.parametrize("is_eager", [False, True])
@on_each_rank(2)
def test_ranks_that_start_differently_fit_one_keras_model(generation, how, is_eager):
    weights, lines = fitted(generation, how, is_eager)
    assert weights == _FITTED and len(lines) == (collective.current().rank == 0)
    for line in lines:
        assert "kernel:0" in line and line.endswith(start_values._IN_FUNCTION + ".")


@on_each_rank(2)
def test_keras_in_a_graph_starts_alike_too():
    """In a TF 1 graph Keras runs functions of the session."""
    ranks = collective.current()
    with tf.Graph().as_default(), tf1.Session().as_default(), lines_said(start_values.__name__) as lines:
        model = tf.keras.Sequential([tf.keras.layers.Dense(1, kernel_initializer="ones", input_shape=[2])])
        optimizer = KerasDistributeOptimizer(tf.keras.optimizers.legacy.SGD(RATE, momentum=0.5))
        model.compile(optimizer, loss=lambda y, out: tf.reduce_mean(out) * (1.0 + ranks.rank))
        model.set_weights([np.full([2, 1], 1.0 + 10.0 * ranks.rank), np.zeros([1])])
        model.fit(np.ones([4, 2]), np.zeros([4, 1]), batch_size=2, verbose=0)
        weights = [weight.tolist() for weight in model.get_weights()]
    tf.keras.backend.clear_session()
    assert weights == _FITTED and len(lines) == (ranks.rank == 0)


@on_each_rank(2)
@in_graph
def test_optimizers_with_other_slots_are_refused():
    """Rank 1 trains with slots that rank 0 does not have."""
    ranks = collective.current()
    variables = _variables()
    inner = tf1.train.AdamOptimizer() if ranks.rank else tf1.train.GradientDescentOptimizer(1.0)
    # A name that no other test has: plans are numbered for each name, and this one must be the n-th on both ranks.
    optimizer = NPUOptimizer(inner, is_distributed=True, name="OfOtherSlots")
    train_op = optimizer.minimize(_loss(variables), var_list=variables)
    said = "rank 1 and rank 0 train different variables. Expected the 4 variables of rank 0.*got 14 other variables"
    with pytest.raises(RanksDisagreeError, match=said), started_session() as session:
        session.run(train_op)


def test_a_session_writes_many_values_in_one_run(monkeypatch):
    targets_of_runs, run_without_engines = [], start_values.run_without_engines

    def counted(session, fetches=(), targets=(), feeds=None):
        targets_of_runs.append(len(targets))
        return run_without_engines(session, fetches, targets, feeds)

    monkeypatch.setattr(start_values, "run_without_engines", counted)
    with tf.Graph().as_default(), tf1.Session() as session:
        shared = tf.zeros([1])
        variables = [tf1.Variable(start) for start in ([1.0], [2.0], shared, shared)]
        session.run(tf1.global_variables_initializer())
        read, write = start_values._session_reader_and_writer(session, variables)
        write(range(4), np.float32([[5], [6], [7], [8]]))
        assert np.ravel(read(range(4))).tolist() == [5, 6, 7, 8]
        write([], [])
    assert targets_of_runs == [3, 1, 0]  # two start from one tensor, which has one value in a run
