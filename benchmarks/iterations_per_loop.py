"""Measures the gain of `iterations_per_loop`: steps per second of an Estimator that trains in loops, and without.

    python benchmarks/iterations_per_loop.py [--loop 100] [--rounds 7]

An `NPUEstimator` trains each model with `iterations_per_loop` 1 and N, in turns, always for as many steps. Measures the
time between the end of an early run and the end of the last one: with hooks, input and log, without the start. Prints
the medians over rounds and the ratio of the steps per second: small models (a step below 1 ms) aim at 2.5, the large
one at no less than 0.98. Small models are a linear one, a perceptron, and the same with dynamic loss scaling, and with
a dropout, without and with a seed. All but the last one train in a loop of the graph; with seeded random numbers, each
step is a prepared call.
"""

from __future__ import annotations

import argparse
import logging
import os
import statistics
import tempfile
import time
import warnings
from typing import NamedTuple

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")

import numpy as np  # noqa: E402
import tensorflow as tf  # noqa: E402

from npu_bridge.estimator.npu.npu_config import NPURunConfig  # noqa: E402
from npu_bridge.estimator.npu.npu_estimator import NPUEstimator  # noqa: E402
from npu_bridge.estimator.npu.npu_loss_scale_manager import ExponentialUpdateLossScaleManager  # noqa: E402
from npu_bridge.estimator.npu.npu_optimizer import NPUOptimizer  # noqa: E402

tf1 = tf.compat.v1
FEATURES = 16


class Model(NamedTuple):
    """A chain of dense layers under an optimizer, and the number of loops of N in a training."""

    layers: int
    units: int
    batch_size: int
    make_optimizer: object
    dropout: float = 0.0
    seed: int | None = None
    steps: int = 3000


def adam():
    return tf1.train.AdamOptimizer(1e-3)


def loss_scaled():
    manager = ExponentialUpdateLossScaleManager(2.0**15, 2000, 1, 2, 0.5)
    return NPUOptimizer(adam(), loss_scale_manager=manager, is_loss_scale=True)


MODELS = {
    "linear": Model(0, 0, 16, lambda: tf1.train.GradientDescentOptimizer(1e-3)),
    "perceptron": Model(1, 32, 16, adam),
    "perceptron, loss scale": Model(1, 32, 16, loss_scaled),
    "perceptron, dropout": Model(1, 32, 16, adam, dropout=0.1),
    "perceptron, seeded dropout": Model(1, 32, 16, adam, dropout=0.1, seed=1),
    "large": Model(4, 768, 256, adam, steps=300),
}


def model_fn(features, labels, mode, params):
    model = params["model"]
    for layer in range(model.layers):
        features = tf.nn.relu(_dense(features, model.units, f"layer_{layer}"))
        if model.dropout:
            features = tf.nn.dropout(features, rate=model.dropout, seed=model.seed)
    loss = tf.reduce_mean(tf.square(_dense(features, 1, "last") - labels))
    train_op = model.make_optimizer().minimize(loss, tf1.train.get_or_create_global_step())
    return tf.estimator.EstimatorSpec(mode, loss=loss, train_op=train_op)


def _dense(inputs, units, name):
    kernel = tf1.get_variable(f"{name}/kernel", [inputs.shape[-1], units])
    return tf.matmul(inputs, kernel) + tf1.get_variable(f"{name}/bias", [units], initializer=tf1.zeros_initializer())


def input_fn(params):
    rows = np.random.RandomState(0).randn(1024, FEATURES).astype("f")
    dataset = tf.data.Dataset.from_tensor_slices((rows, rows[:, :1])).repeat()
    return dataset.batch(params["model"].batch_size, drop_remainder=True).prefetch(8)


class RunTimes(tf.estimator.SessionRunHook):
    """Notes when each run ended."""

    def __init__(self):
        self.ends = []

    def after_run(self, run_context, run_values):
        self.ends.append(time.perf_counter())


def secs_per_step(model, loop):
    """Trains once; returns seconds per step, from the end of a run after the first third to the last."""
    with tempfile.TemporaryDirectory() as folder:
        config = NPURunConfig(
            model_dir=folder, save_checkpoints_steps=0, iterations_per_loop=loop, log_step_count_steps=None
        )
        times = RunTimes()
        estimator = NPUEstimator(model_fn, config=config, params={"model": model})
        estimator.train(input_fn, hooks=[times], max_steps=model.steps)
    start = model.steps // 3 // loop
    return (times.ends[-1] - times.ends[start - 1]) / (model.steps - start * loop)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--loop", type=int, default=100)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--model", choices=MODELS, action="append", help="all by default")
    arguments = parser.parse_args()

    logging.disable(logging.WARNING)
    warnings.simplefilter("ignore")
    for name in arguments.model or MODELS:
        rounds = []
        for number in range(arguments.rounds):
            pair = [1, arguments.loop] if number % 2 else [arguments.loop, 1]
            secs = {loop: secs_per_step(MODELS[name], loop) for loop in pair}
            rounds.append((secs[1], secs[arguments.loop]))
        single, looped = (1000 * statistics.median(column) for column in zip(*rounds))
        ratio = statistics.median(one / many for one, many in rounds)
        print(
            f"{name:26s} {single:7.3f} ms/step, in loops of {arguments.loop} {looped:7.3f} ms/step, "
            f"ratio of steps/s {ratio:.2f}",
            flush=True,
        )


if __name__ == "__main__":
    main()
