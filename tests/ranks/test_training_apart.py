"""Ranks that train apart, or read the same first batch, are told before the first step; others are told nothing."""

from __future__ import annotations

import functools
import tempfile

import numpy as np
import pytest
import tensorflow as tf

from npu_bridge import collective
from npu_bridge.collective.checks import exchanges
from npu_bridge.estimator.npu.npu_config import NPURunConfig
from npu_bridge.estimator.npu.npu_estimator import NPUEstimator, NPUEstimatorSpec
from npu_bridge.estimator.npu.npu_hook import NPUBroadcastGlobalVariablesHook
from npu_bridge.estimator.npu.npu_optimizer import (
    KerasDistributeOptimizer,
    NPUDistributedOptimizer,
    NPUOptimizer,
    npu_distributed_optimizer_wrapper,
)
from npu_bridge.hccl import hccl_ops
from npu_bridge.npu_init import NPUBroadcastGlobalVariablesCallback, npu_callbacks_append, npu_keras_optimizer
from npu_bridge.optimizers import keras as keras_optimizers
from npu_bridge.optimizers import keras_legacy as keras_legacy_optimizers
from npu_bridge.stages import Accumulate, Adasum, PartialSync
from tests.goldens.two_layers import in_graph
from tests.npu_run.launching import npu_run, write_script
from tests.once import lines_said
from tests.ranks.ways import LinesBySteps, horovod, started_session

tf1 = tf.compat.v1
_STEPS = 3


def _sgd():
    return tf1.train.GradientDescentOptimizer(0.1)


def _model():
    weight = tf1.get_variable("weight", [2], initializer=tf1.ones_initializer())
    return tf.reduce_sum(tf.square(weight)), weight


def _run(steps, lines):
    """Runs operators one after the other in a plain session, a few times."""
    with started_session() as session:
        for _ in range(_STEPS):
            for step in steps:
                session.run(step)
            lines.steps += 1


@in_graph
def _session(optimizer, lines):
    _run([optimizer().minimize(_model()[0])], lines)


@in_graph
def _monitored(optimizer, lines):
    train_op = optimizer().minimize(_model()[0], tf1.train.get_or_create_global_step())
    hooks = [NPUBroadcastGlobalVariablesHook(0), tf1.train.StopAtStepHook(_STEPS)]
    with tf1.train.MonitoredTrainingSession(hooks=hooks) as session:
        while not session.should_stop():
            session.run(train_op)
            lines.steps += 1


def _estimator(optimizer, lines, mode="train"):
    def model_fn(features, labels, mode):
        loss, weight = _model()
        if mode == tf.estimator.ModeKeys.PREDICT:
            return NPUEstimatorSpec(mode, predictions=features * weight)
        loss += tf.reduce_mean(features)
        return NPUEstimatorSpec(mode, loss=loss, train_op=optimizer().minimize(loss, tf1.train.get_global_step()))

    def input_fn():
        return tf.data.Dataset.from_tensors(np.ones([1, 2], np.float32)).repeat(_STEPS)

    with tempfile.TemporaryDirectory() as folder:
        estimator = NPUEstimator(model_fn, config=NPURunConfig(model_dir=folder, log_step_count_steps=None))
        if mode == "train":
            estimator.train(input_fn, max_steps=_STEPS)
        elif mode == "evaluate":
            estimator.evaluate(input_fn)
        else:
            list(estimator.predict(input_fn))


def _fit(optimizer, lines, eagerly=False):
    model = tf.keras.Sequential([tf.keras.layers.Dense(1, kernel_initializer="ones", input_shape=(2,))])
    model.compile(optimizer(), "mse", run_eagerly=eagerly)
    count = tf.keras.callbacks.LambdaCallback(on_train_batch_end=lambda *_: setattr(lines, "steps", lines.steps + 1))
    callbacks = [NPUBroadcastGlobalVariablesCallback(0), count]
    model.fit(np.ones([4, 2], np.float32), np.ones([4, 1], np.float32), 2, verbose=0, callbacks=callbacks)


def _fit_eagerly(optimizer, lines):
    _fit(optimizer, lines, eagerly=True)


@in_graph
def _fit_in_graph(optimizer, lines):
    with tf1.Session().as_default():
        _fit(optimizer, lines)


@in_graph
def _in_branch(optimizer, lines):
    """Puts the update into a condition of TensorFlow 2, as stock loss scaling does."""
    made, (loss, _) = optimizer(), _model()
    gradients = made.compute_gradients(loss)

    def updated():
        with tf.control_dependencies([made.apply_gradients(gradients)]):
            return tf.constant(True)

    _run([tf.cond(tf.reduce_all(tf.math.is_finite(loss)), updated, lambda: False)], lines)


def _horovod_of_keras(optimizer, **arguments):
    import horovod.tensorflow.keras as hvd

    return hvd.DistributedOptimizer(optimizer, **arguments)


def _stock_horovod_of_keras(lines):
    import horovod.keras as hvd

    stock = functools.partial(hvd.DistributedOptimizer, tf.keras.optimizers.legacy.SGD(0.1))
    _fit(lambda: npu_keras_optimizer(stock(), is_distributed=False, stages=[Accumulate(1)]), lines)


@in_graph
def _collectives_by_hand(lines):
    """Gradients are summed by hccl_ops, and wait in a variable for the next run."""
    loss, weight = _model()
    kept = tf1.get_variable("kept", [2], trainable=False, initializer=tf1.zeros_initializer())
    keep = kept.assign_add(hccl_ops.allreduce(tf.gradients(loss, weight)[0], "sum"))
    _run([keep, NPUOptimizer(_sgd()).apply_gradients([(tf.identity(kept), weight)])], lines)


@in_graph
def _weights_by_hand(lines):
    """Weights are averaged after the step, in a run of their own."""
    loss, weight = _model()
    train_op = NPUOptimizer(_sgd()).minimize(loss)
    _run([train_op, weight.assign(hccl_ops.allreduce(weight, "sum") / 2)], lines)


def _function_by_hand(optimizer, lines):
    """A function averages weights after the update."""
    optimizer, weight = optimizer(), tf.Variable([1.0, 2.0])

    @tf.function
    def step():
        optimizer.apply_gradients([(2.0 * weight, weight)])
        weight.assign(hccl_ops.allreduce(weight, "sum") / 2)

    step()


def _eager_by_hand(optimizer, lines, weights=(1.0, 2.0)):
    optimizer, weight = optimizer(), tf.Variable(weights)
    optimizer.apply_gradients([(hccl_ops.allreduce(2.0 * weight, "sum"), weight)])


def _metric_in_a_loop(optimizer, lines):
    """A value that is only averaged for display, before the update, does not train."""
    optimizer, weight = optimizer(), tf.Variable([1.0, 2.0])
    for _ in range(_STEPS):
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(weight**2)
        hccl_ops.allreduce(loss, "sum")
        optimizer.apply_gradients([(tape.gradient(loss, weight), weight)])
        lines.steps += 1


def _stock_horovod_tape(lines):
    import horovod.tensorflow as hvd

    optimizer, weight = _CURRENT.SGD(0.1), tf.Variable([1.0, 2.0])
    with hvd.DistributedGradientTape(tf.GradientTape()) as tape:
        loss = tf.reduce_sum(weight**2)
    optimizer.apply_gradients(zip(tape.gradient(loss, [weight]), [weight]))


@in_graph
def _without_optimizer(lines):
    loss, weight = _model()
    _run([tf1.assign_sub(weight, 0.1 * tf.gradients(loss, weight)[0])], lines)


@in_graph
def _without_optimizer_together(lines):
    """And weights are clipped in a run of their own, which is no training."""
    loss, weight = _model()
    gradient = hccl_ops.allreduce(tf.gradients(loss, weight)[0], "sum")
    _run([tf1.assign(weight, tf.clip_by_value(weight, -1.0, 1.0)), tf1.assign_sub(weight, 0.1 * gradient)], lines)


@in_graph
def _other_runs(lines):
    """Initialisers, losses, counters and loaded values are no training."""
    loss, weight = _model()
    NPUOptimizer(_sgd()).minimize(loss)
    step = tf1.train.get_or_create_global_step()
    _run([loss, step.assign_add(1), weight.initializer], lines)


@in_graph
def _metric_over_ranks(lines):
    """A value that is only averaged for display does not train."""
    loss, _ = _model()
    train_op = NPUOptimizer(_sgd()).minimize(loss)
    _run([[train_op, hccl_ops.allreduce(loss, "sum")]], lines)


def _keras_apart(kind):
    return lambda: npu_keras_optimizer(kind.SGD(0.1), is_distributed=False, stages=[Accumulate(1)])


def _apart():
    return NPUOptimizer(_sgd())


def _with(*stages):
    return lambda: NPUOptimizer(_sgd(), is_distributed=True, stages=list(stages))


_LEGACY, _CURRENT = tf.keras.optimizers.legacy, tf.keras.optimizers


def _in_place(kind):
    return npu_distributed_optimizer_wrapper(kind.SGD(0.1))


def _keras_with(*stages):
    return lambda kind: npu_keras_optimizer(kind.SGD(0.1), is_distributed=True, stages=list(stages))


# What trains, and perhaps what makes its optimizer.
APART = {
    "session": (_session, _apart),
    "session, Keras inside": (_session, lambda: NPUOptimizer(_CURRENT.SGD(0.1))),
    "session, in a branch": (_in_branch, _apart),
    "monitored session": (_monitored, _apart),
    "estimator": (_estimator, _apart),
    "estimator, stock optimizer": (_estimator, _sgd),
    "fit, legacy": (_fit, _keras_apart(_LEGACY)),
    "fit, current": (_fit, _keras_apart(_CURRENT)),
    "fit, eager": (_fit_eagerly, _keras_apart(_CURRENT)),
    "fit in a graph": (_fit_in_graph, _keras_apart(_LEGACY)),
    "a metric over ranks": (_metric_over_ranks,),
    "no optimizer": (_without_optimizer,),
    "fit, one of this package": (_fit, lambda: keras_optimizers.Adam(0.1)),
    "fit, a legacy one of this package": (_fit, lambda: keras_legacy_optimizers.Adam(0.1)),
    "fit, stock": (_fit, lambda: "sgd"),
    "fit, stock and eager": (_fit_eagerly, lambda: "sgd"),
    "fit, stock and legacy": (_fit, lambda: _LEGACY.SGD(0.1)),
    "fit, stock, legacy and eager": (_fit_eagerly, lambda: _LEGACY.SGD(0.1)),
    "fit, stock, scaled": (_fit, lambda: tf.keras.mixed_precision.LossScaleOptimizer(_LEGACY.SGD(0.1))),
    "a metric in a stock loop": (_metric_in_a_loop, lambda: _CURRENT.SGD(0.1)),
}
TOGETHER = {
    "session": (_session, _with()),
    "distributed": (_monitored, lambda: NPUDistributedOptimizer(_sgd())),
    "evaluation": (functools.partial(_estimator, mode="evaluate"), _apart),
    "prediction": (functools.partial(_estimator, mode="predict"), _apart),
    "in place": (_session, lambda: npu_distributed_optimizer_wrapper(_sgd())),
    "accumulation": (_session, _with(Accumulate(2))),
    "partial": (_session, _with(PartialSync(2))),
    "Adasum": (_session, _with(Adasum())),
    "stock Horovod": (_session, lambda: horovod(_apart(), "none", None)),
    "stock Horovod, in a branch": (_in_branch, lambda: horovod(_apart(), "none", None)),
    "stock Horovod, Keras": (_stock_horovod_of_keras,),
    "collectives by hand": (_collectives_by_hand,),
    "weights by hand": (_weights_by_hand,),
    "function by hand": (_function_by_hand, _keras_apart(_CURRENT)),
    "eager by hand": (_eager_by_hand, _keras_apart(_CURRENT)),
    "no training": (_other_runs,),
    "no optimizer": (_without_optimizer_together,),
    "stock and legacy, by hand": (_eager_by_hand, lambda: _LEGACY.SGD(0.1)),
    "one number, by hand": (functools.partial(_eager_by_hand, weights=3.0), lambda: _CURRENT.SGD(0.1)),
    "stock, Horovod's tape": (_stock_horovod_tape,),
    "fit, one of this package": (_fit, lambda: KerasDistributeOptimizer(keras_optimizers.Adam(0.1))),
    "in place, stock": (_fit, functools.partial(_in_place, _CURRENT)),
    "in place, stock, legacy, eager": (_fit_eagerly, functools.partial(_in_place, _LEGACY)),
    **{
        f"{fit.__name__} of {kind.__name__} with {name}": (fit, functools.partial(make, kind))
        for fit in (_fit, _fit_eagerly)
        for kind in (_CURRENT, _LEGACY)
        for name, make in {
            "Horovod": lambda kind: _horovod_of_keras(kind.SGD(0.1)),
            "Horovod, adding up": lambda kind: _horovod_of_keras(kind.SGD(0.1), backward_passes_per_step=2),
            "KerasDistributeOptimizer": lambda kind: KerasDistributeOptimizer(kind.SGD(0.1)),
            "Accumulate": _keras_with(Accumulate(4)),
            "PartialSync": _keras_with(PartialSync(2)),
        }.items()
    },
}


def _said(names, table):
    said = {}
    for name in names:
        train, *make = globals()[table][name]
        with LinesBySteps(exchanges.__name__) as lines:
            train(*make, lines)
        said[name] = lines.lines
    return said


@pytest.mark.few_fast(1, "every second way")
@pytest.mark.parametrize("half", [0, 1])
def test_ranks_that_train_apart_say_so_before_their_first_step(on_ranks, half):
    ways = list(APART)[half::2]
    on_rank_0, on_rank_1 = on_ranks(2, _said, ways, "APART")
    assert {name: len(lines) for name, lines in on_rank_0.items()} == dict.fromkeys(ways, 2)
    assert not any(on_rank_1.values())
    for name, ((steps, what), (_, fix)) in on_rank_0.items():
        assert steps == 0, name
        assert "2 ranks train apart" in what and "trains its own model" in what
        assert "is_distributed=True" in fix and "one rank" in fix


@pytest.mark.slow("every way to train")
def test_ranks_that_train_together_and_those_that_do_not_train_say_nothing(on_ranks):
    for said in on_ranks(2, _said, list(TOGETHER), "TOGETHER"):
        assert [name for name, lines in said.items() if lines] == []


@pytest.mark.ranks(2)
@pytest.mark.slow("jobs of their own; the warning is held by the case above")
@pytest.mark.parametrize("first", ["", "import horovod.tensorflow.keras as hvd"])
def test_a_script_that_only_imports_the_package_is_told(tmp_path, first):
    script = f"""
        {first}
        import numpy as np
        import tensorflow as tf
        import npu_bridge

        model = tf.keras.Sequential([tf.keras.layers.Dense(1, input_shape=(2,))])
        model.compile("sgd", "mse")
        model.fit(np.ones([4, 2]), np.ones([4, 1]), verbose=0)
        print("trained")
    """
    code, output = npu_run("-np", 2, write_script(tmp_path, script), cwd=tmp_path)
    told = [line for line in output.splitlines() if "train apart" in line]
    assert (code, len(told)) == (0, 1), output


@pytest.mark.slow("a start of its own to see no message")
def test_one_rank_says_nothing():
    names = ["session", "fit, current", "fit, stock"]
    assert _said(names, "APART") == dict.fromkeys(names, [])
    assert not hasattr(_CURRENT.Optimizer.__init__, "__wrapped__"), "and nothing is put around its optimizers"


# Equal first batches are told by rank 0, and no batch is lost for it.
_ROWS = np.arange(12, dtype=np.float32).reshape(6, 2)


def _about_batches(lines):
    return [line for line in lines if "first batch" in line]


def _dataset(name):
    """Returns a rank's input: three batches, the "same" or "sharded" ones of the rows above, or only a constant."""
    ranks = collective.current()
    if name == "constant":
        return tf.data.Dataset.from_tensors((np.zeros([2], np.float32), np.float32(1))).repeat(6).batch(2)
    rows = tf.data.Dataset.from_tensor_slices((_ROWS, np.arange(6.0, dtype=np.float32)))
    return rows.batch(2) if name == "same" else rows.shard(ranks.size, ranks.rank).batch(1)


def _losses_of(read, labels):
    weight = tf1.get_variable("weight", [2, 1], initializer=tf1.zeros_initializer())
    loss = tf.reduce_mean(tf.square(tf.matmul(read, weight)[:, 0] - labels))
    train_op = NPUDistributedOptimizer(tf1.train.GradientDescentOptimizer(0.0)).minimize(loss)
    return loss, train_op


def _said_in_a_session(read, labels, runs, feeds=None):
    """On a rank: all losses, which show all batches, and what was said."""
    loss, train_op = _losses_of(read, labels)
    with lines_said() as lines, started_session() as session:
        return [float(session.run([loss, train_op], feeds)[0]) for _ in range(runs)], _about_batches(lines)


@in_graph
def _in_a_session(name):
    return _said_in_a_session(*tf1.data.make_one_shot_iterator(_dataset(name)).get_next(), 3)


@in_graph
def _fed(rows):
    read, labels = tf1.placeholder(tf.float32, [None, 2]), tf1.placeholder(tf.float32, [])
    return _said_in_a_session(read, labels, 1, {read: rows, labels: 0.5})[1]


@in_graph
def _read_on_rank_0_alone():
    fed = tf.ones([2, 2]), tf.zeros([2])
    if collective.current().rank == 0:
        fed = tf1.data.make_one_shot_iterator(_dataset("same")).get_next()
    return _said_in_a_session(*fed, 1)[1]


class _TakesThreeBatches(tf.keras.Sequential):
    def make_train_function(self, force=False):
        def train(iterator):
            return [self.train_step(next(iterator)) for _ in range(3)][-1]

        self.train_function = self.train_tf_function = tf.function(train)
        return self.train_function


def _fit_on(name, kind=tf.keras.Sequential):
    """On a rank: the mean loss of an epoch, which shows all batches, what was said, and how often steps were traced."""
    model = kind([tf.keras.layers.Dense(1, kernel_initializer="zeros", input_shape=(2,))])
    model.compile(KerasDistributeOptimizer(tf.keras.optimizers.SGD(0.0)), "mse")
    dataset = _dataset(name)
    with lines_said() as lines:
        done = model.fit(dataset, epochs=2, verbose=0, callbacks=npu_callbacks_append())
    return done.history["loss"], _about_batches(lines), model.train_tf_function.experimental_get_tracing_count()


def _all():
    names = ("same", "sharded", "constant")
    rank = collective.current().rank
    return (
        {name: _in_a_session(name) for name in names},
        {name: _fit_on(name) for name in names[:2]},
        [_fed(_ROWS), _fed(_ROWS + rank), _read_on_rank_0_alone()],
    )


def test_equal_first_batches_are_said_once_by_rank_0_and_no_batch_is_lost(on_ranks):
    answers = on_ranks(2, _all)
    for rank, (in_sessions, in_fits, others) in enumerate(answers):
        for name, is_said in (("same", True), ("sharded", False), ("constant", False)):
            losses, lines = in_sessions[name]
            assert len(lines) == (is_said and rank == 0), f"{name} on rank {rank}"
            numbers = np.arange(6.0) ** 2
            if name == "same":
                np.testing.assert_array_equal(losses, numbers.reshape(3, 2).mean(axis=1))
            elif name == "sharded":
                np.testing.assert_array_equal(losses, numbers[rank::2])
            if name in in_fits:
                of_fit, lines, traces = in_fits[name]
                assert len(lines) == (is_said and rank == 0), f"{name} in fit on rank {rank}"
                np.testing.assert_allclose(of_fit, [numbers.mean()] * 2, rtol=1e-6)  # of both ranks, averaged
                assert traces == 1
        assert [len(lines) for lines in others] == [rank == 0, 0, 0]
    line = answers[0][2][0][0]
    assert "all 2 ranks have read the same first batch" in line
    assert "dataset.shard(get_rank_size(), get_rank_id())" in line


def test_a_step_may_take_several_batches(on_ranks):
    for losses, _, _ in on_ranks(2, _fit_on, "sharded", _TakesThreeBatches):
        np.testing.assert_allclose(losses[0], np.mean(np.arange(6.0) ** 2), rtol=1e-6)
