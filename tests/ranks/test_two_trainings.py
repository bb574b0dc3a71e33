"""Two trainings of one process have transfers of their own: ranks that run them in another order never mix them up."""

from __future__ import annotations

import random
import threading
import time
import weakref
from concurrent.futures import ThreadPoolExecutor
from multiprocessing.pool import ThreadPool

import numpy as np
import pytest
import tensorflow as tf

from npu_bridge import collective
from npu_bridge.collective import wire_names
from npu_bridge.estimator.npu.npu_config import NPURunConfig
from npu_bridge.estimator.npu.npu_estimator import NPUEstimator
from npu_bridge.estimator.npu.npu_helpers import npu_callbacks_append, npu_keras_optimizer
from npu_bridge.estimator.npu.npu_optimizer import NPUDistributedOptimizer, NPUOptimizer
from npu_bridge.reporting.step_hook import StepHook
from npu_bridge.reporting.straggler_hook import StragglerHook
from npu_bridge.stages import PartialSync
from tests.garbage import collect_garbage
from tests.npu_run.launching import npu_run, write_script
from tests.rank_pool import on_each_rank
from tests.ranks.ways import slow_scale

tf1 = tf.compat.v1
STEPS = 3
# Gradients of the two models are 1.5 and 15, the means of those of two ranks.
ENDS = [-1.5 * STEPS, -15.0 * STEPS]


class Pauses:
    """Waits now and then for a random moment, another one on each rank."""

    def __init__(self, seed):
        self._numbers = random.Random(seed)

    def __call__(self, *_, **__):
        time.sleep(self._numbers.random() * 0.03)


def rows_of(model):
    rank = collective.current().rank
    return np.full([4, 1], (1.0, 10.0)[model] * (1 + rank), np.float32)


def weight_and_loss(features):
    weight = tf1.get_variable("w", [1, 1], initializer=tf1.zeros_initializer(), use_resource=True)
    return weight, tf.reduce_mean(tf.matmul(features, weight))


def sgd():
    return NPUDistributedOptimizer(tf1.train.GradientDescentOptimizer(1.0))


def in_session(model, pause, folder):
    with tf.Graph().as_default():
        weight, loss = weight_and_loss(rows_of(model))
        train, session = sgd().minimize(loss), tf1.Session()
        session.run(tf1.global_variables_initializer())

    def run():
        for _ in range(STEPS):
            pause()
            session.run(train)
        return session.run(weight)

    return run


def by_estimator(model, pause, folder):
    def model_fn(features, labels, mode):
        weight, loss = weight_and_loss(features)
        return tf.estimator.EstimatorSpec(mode, loss=loss, train_op=sgd().minimize(loss, tf1.train.get_global_step()))

    config = NPURunConfig(model_dir=f"{folder}/{model}", log_step_count_steps=None)
    estimator = NPUEstimator(model_fn, config=config)

    def run():
        pause()
        estimator.train(lambda: tf.data.Dataset.from_tensors(rows_of(model)).repeat(), steps=STEPS)
        return estimator.get_variable_value("w") if collective.current().rank == 0 else ENDS[model]

    return run


def keras_model():
    dense = tf.keras.layers.Dense(1, use_bias=False, kernel_initializer="zeros")
    model = tf.keras.Sequential([tf.keras.Input([1]), dense])
    model.compile(npu_keras_optimizer(tf.keras.optimizers.SGD(1.0)), lambda labels, outputs: tf.reduce_mean(outputs))
    return model


def by_fit(model, pause, folder):
    made = keras_model()

    def run():
        callbacks = npu_callbacks_append([tf.keras.callbacks.LambdaCallback(on_batch_begin=pause)])
        rows = np.tile(rows_of(model), [STEPS, 1])
        made.fit(rows, np.zeros_like(rows), 4, verbose=0, callbacks=callbacks)
        return made.get_weights()[0]

    return run


def in_own_loop(model, pause, folder):
    made, rows = keras_model(), rows_of(model)

    @tf.function
    def step():
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(made(rows))
        made.optimizer.apply_gradients(zip(tape.gradient(loss, made.weights), made.weights))

    def run():
        for _ in range(STEPS):
            pause()
            step()
        return made.get_weights()[0]

    return run


WAYS = {"session": in_session, "estimator": by_estimator, "fit": by_fit, "own_loop": in_own_loop}


@pytest.mark.few_fast(
    [f"{way}-made_before" for way in ("session", "estimator")] + ["session-made_in_the_thread"],
    "the other ways take the same transfers",
)
@pytest.mark.parametrize("is_made_there", [False, True], ids=["made_before", "made_in_the_thread"])
@pytest.mark.parametrize("way", WAYS)
@on_each_rank(2)
def test_threads_train_each_model_with_its_own_gradients(tmp_path, way, is_made_there):
    """Threads begin in another order on each rank."""
    rank, ends, errors = collective.current().rank, [None, None], []
    pauses = [Pauses((1, rank, model).__hash__()) for model in (0, 1)]
    runs = [None if is_made_there else WAYS[way](model, pauses[model], tmp_path) for model in (0, 1)]

    def train(model):
        try:
            pauses[model]()
            ends[model] = float(np.ravel((runs[model] or WAYS[way](model, pauses[model], tmp_path))())[0])
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=train, args=[model]) for model in (0, 1)]
    # Those that make their model are told apart by their order, which then is the same on all ranks.
    for thread in threads if is_made_there or rank == 0 else reversed(threads):
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]
    assert ends == ENDS


SCRIPT = """
import sys
from tests.ranks.test_two_trainings import WAYS, collective
made = [WAYS[sys.argv[1]](model, lambda *_, **__: None, "out") for model in (0, 1)]
for run in made if collective.current().rank == 0 else reversed(made):
    run()
"""


@pytest.mark.ranks(2)
@pytest.mark.slow("the hang detector takes ten seconds each time")
@pytest.mark.parametrize("way", ["session", "fit"])
def test_another_order_on_one_rank_ends_the_job_with_both_names(tmp_path, way):
    code, output = npu_run("-np", "2", write_script(tmp_path, SCRIPT), way, cwd=tmp_path)
    *_, last = output.splitlines()
    assert code == 1 and last.startswith("npu-run: no progress for ")
    assert last.count("training_1.") == 1


def counted():
    """Returns the label of the next training, after one that only rank 0 has loaded or evaluated."""
    model = keras_model()
    if collective.current().rank == 0:
        copy = type(model.optimizer).from_config(model.optimizer.get_config())
        with tf.Graph().as_default():
            _call_model_fn("eval")
        assert copy is not None
    return keras_model().optimizer._pipeline.pipeline.transfers.label, wire_names.CollectivesOwner().label


def _call_model_fn(mode):  # as an Estimator calls it
    sgd().minimize(weight_and_loss(np.ones([1, 1], np.float32))[1])


def test_what_rank_0_alone_loads_or_evaluates_is_not_counted(on_ranks):
    first, second = on_ranks(2, counted)
    assert first == second


@on_each_rank(2, gives=[False, False, True])  # the last one is the hooks'
def test_a_trained_graph_goes_when_nothing_uses_it():
    """Returns which of three graphs are still there, after trainings in turn with the same manager and hooks."""
    manager, hooks = slow_scale(), [StepHook(), StragglerHook()]

    def train(added):
        with tf.Graph().as_default() as graph:
            _, loss = weight_and_loss(rows_of(0))
            inner = tf1.train.AdamOptimizer()
            optimizer = NPUOptimizer(inner, manager, True, True, stages=added)
            train_op = optimizer.minimize(loss, tf1.train.get_or_create_global_step())
            with tf1.train.MonitoredTrainingSession(hooks=hooks) as session:
                for _ in range(2):
                    session.run(train_op)
        return weakref.ref(graph)

    graphs = [train(added) for added in ([], [PartialSync(2)], [])]
    collect_garbage()
    return [graph() is not None for graph in graphs]


def labels_in_a_pool(make_pool, workers):
    """On a rank: labels of two trainings in a pool, or its error; of two workers each makes one of the trainings."""
    meeting = threading.Barrier(workers)

    def make(_):
        meeting.wait(60)
        return wire_names.CollectivesOwner().label

    with make_pool(workers) as pool:
        try:
            return list(pool.map(make, range(2)))
        except RuntimeError as error:
            return str(error)


def labels_in_threads():
    """On a rank: the labels of trainings in two threads whose function has the name of one of Python's own."""
    labels = []

    def worker():
        labels.append(wire_names.CollectivesOwner().label)

    for _ in range(2):
        thread = threading.Thread(target=worker)
        thread.start()
        thread.join()
    return labels


@pytest.mark.parametrize("make_pool", [ThreadPoolExecutor, ThreadPool])
def test_two_workers_of_a_pool_are_refused_as_ranks_share_them_out_differently(on_ranks, make_pool):
    first, second = on_ranks(2, labels_in_a_pool, make_pool, 1)
    assert first == second and len(set(first)) == 2
    for error in on_ranks(2, labels_in_a_pool, make_pool, 2):
        assert "workers of a pool take trainings in any order" in error


def test_threads_of_ones_own_make_a_training_each(on_ranks):
    first, second = on_ranks(2, labels_in_threads)
    assert first == second and len(set(first)) == 2
