"""Ranks that all wait, each for a transfer that no other rank makes: each way to wait ends by itself."""

from __future__ import annotations

import pytest

from tests.npu_run.launching import PATIENT, needs_horovod, npu_run, write_script

pytestmark = needs_horovod

# Each of these makes a function that takes part in a transfer. All ranks call all of them once, then each rank its own.
SCRIPT = """
import pathlib
import sys
import numpy as np
import tensorflow as tf
from npu_bridge.collective.small_values import wait_for_ranks
from npu_bridge.hccl import hccl_ops
from npu_bridge.npu_init import *

rank = get_rank_id()
x = np.ones([16, 4], np.float32)
y = np.ones([16, 1], np.float32)


def in_session(build):
    with tf.Graph().as_default() as graph:
        fetched = build()
        session = tf.compat.v1.Session()
        session.run(tf.compat.v1.global_variables_initializer())
    graph.finalize()
    return lambda: session.run(fetched)  # in a session


def training():
    weights = tf.compat.v1.get_variable("w", [4, 1], use_resource=True)
    loss = tf.reduce_mean((tf.matmul(x, weights) - y) ** 2)
    return NPUDistributedOptimizer(tf.compat.v1.train.GradientDescentOptimizer(0.01)).minimize(loss)


def broadcast():
    return hccl_ops.broadcast([tf.constant([1.0])], 0)


def model():
    made = tf.keras.Sequential([tf.keras.layers.Dense(1)])
    made.compile(npu_keras_optimizer(tf.keras.optimizers.SGD(0.01)), "mse")
    return made


def fit():
    made, callbacks = model(), npu_callbacks_append()
    calls = []

    def run():
        calls.append(0)
        rows = 16 if len(calls) == 1 or sys.argv[1] == sys.argv[2] == "fit" and rank else 32
        made.fit(np.tile(x, [rows // 16, 1]), np.tile(y, [rows // 16, 1]), 16, verbose=0, callbacks=callbacks)

    return run


def own_loop():
    made = model()

    @tf.function
    def step():
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean((made(x) - y) ** 2)
        weights = made.trainable_variables
        made.optimizer.apply_gradients(zip(tape.gradient(loss, weights), weights))

    return step


def estimator():
    def model_fn(features, labels, mode):
        loss = tf.reduce_mean((tf.compat.v1.layers.dense(features, 1) - labels) ** 2)
        optimizer = NPUDistributedOptimizer(tf.compat.v1.train.GradientDescentOptimizer(0.01))
        step = tf.compat.v1.train.get_or_create_global_step()
        return NPUEstimatorSpec(mode, loss=loss, train_op=optimizer.minimize(loss, step))

    def input_fn():
        return tf.data.Dataset.from_tensors((x, y)).repeat()

    made = NPUEstimator(model_fn, config=NPURunConfig(model_dir="model"))
    return lambda: made.train(input_fn, steps=2)


ways = {
    "session": lambda: in_session(training),
    "gather": lambda: in_session(lambda: hccl_ops.allgather(tf.constant([1.0]), 2)),
    "broadcast": lambda: in_session(broadcast),
    "scatter": lambda: in_session(lambda: hccl_ops.reduce_scatter(tf.ones([2]), "sum", 2)),
    "fit": fit,
    "own_loop": own_loop,
    "estimator": estimator,
    "eager": lambda: lambda: hccl_ops.allreduce(tf.constant([1.0]), "sum"),
    "barrier": lambda: lambda: wait_for_ranks("here"),
}
calls = {}
for way in dict.fromkeys(sys.argv[1:]):
    calls[way] = ways[way]()
    calls[way]()
print("begins", flush=True)
pathlib.Path("hanging").touch()
calls[sys.argv[1 + rank]]()
if sys.argv[1] == sys.argv[2]:
    calls[sys.argv[1]]()  # one more, for one rank has come back
"""
WAYS = ["session", "own_loop", "gather", "scatter", "broadcast", "fit", "estimator", "eager", "barrier"]
PAIRS = [*zip(WAYS, [*WAYS[1:], WAYS[0]]), ("fit", "fit")]


@pytest.mark.few_fast(["session-own_loop"], "each pair is a job")
@pytest.mark.parametrize(("one", "other"), PAIRS, ids=["-".join(pair) for pair in PAIRS])
def test_ranks_that_wait_for_different_things_are_named_and_end(tmp_path, one, other):
    script, soon = write_script(tmp_path, SCRIPT), f"{PATIENT}\nhang.SHORT_LIMIT_SECS = 3.0"
    code, output = npu_run("-np", "2", script, one, other, cwd=tmp_path, prepare=soon)
    assert code == 1 and output.count("begins") == 2
    *_, last = output.splitlines()
    assert "rank 0 " in last and "rank 1 " in last and "EndTogether" in last
    if "fit" in (one, other) and "was through with model.fit" in last and "no progress" not in last:
        return  # on a machine so busy that 20 s pass before it is certain that nothing moves
    assert last.startswith("npu-run: no progress for ")
    assert last.count(" waiting for ") == 2 and last.count("train.py:") == 2


SLOW = """
import ctypes
import signal
import sys
import time
import numpy as np
import tensorflow as tf
from npu_bridge.npu_init import *

rank = get_rank_id()
model = tf.keras.Sequential([tf.keras.Input([4]), tf.keras.layers.Dense(1)])
model.compile(npu_keras_optimizer(tf.keras.optimizers.SGD(0.01)), "mse")


def sleep(x):
    if rank == 1:
        time.sleep(20)
    return x


def compute(x):
    end = time.thread_time() + 20
    while rank == 1 and time.thread_time() < end:
        pass
    return x


def fit(pause):
    callback = tf.keras.callbacks.LambdaCallback(on_train_batch_begin=lambda batch, logs=None: pause(batch))
    model.fit(np.ones([16, 4]), np.ones([16, 1]), 16, verbose=0, callbacks=npu_callbacks_append([callback]))


@tf.function
def step(x):
    with tf.GradientTape() as tape:
        loss = tf.reduce_mean(model(tf.ensure_shape(tf.py_function(sleep, [x], tf.float32), [2, 4])))
    weights = model.trainable_variables
    model.optimizer.apply_gradients(zip(tape.gradient(loss, weights), weights))


def fit_generator():
    rows = (sleep((np.ones(4), np.ones(1))) for _ in range(2))
    kinds = (tf.TensorSpec([4]), tf.TensorSpec([1]))
    model.fit(tf.data.Dataset.from_generator(lambda: rows, output_signature=kinds).batch(2), verbose=0)


def wait_in_c():  # as TensorFlow does when it frees an iterator, until its tuner has its next turn
    if rank == 1:
        signal.signal(signal.SIGALRM, lambda *_: None)
        signal.setitimer(signal.ITIMER_REAL, 20)
        ctypes.CDLL(None).sem_wait(ctypes.byref((ctypes.c_long * 4)()))
    fit(lambda batch: None)


ways = {
    "sleeps": lambda: fit(sleep),
    "computes": lambda: fit(compute),
    "sleeps in an operator": lambda: step(tf.ones([2, 4])),
    "reads slowly": fit_generator,
    "waits in C": wait_in_c,
}
ways[sys.argv[1]]()
print("trained", flush=True)
"""


@pytest.mark.slow("each waits for twenty seconds")
@pytest.mark.parametrize("way", ["sleeps", "computes", "sleeps in an operator", "reads slowly", "waits in C"])
def test_a_rank_that_takes_twenty_seconds_longer_ends_no_job(tmp_path, way):
    code, output = npu_run("-np", "2", write_script(tmp_path, SLOW), way, cwd=tmp_path)
    assert code == 0 and output.count("trained") == 2 and "no progress" not in output
