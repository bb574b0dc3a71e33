"""Measures the cost of NPUOptimizer in one process: step times beside stock TensorFlow's, with many small variables.

    python benchmarks/overhead.py [--variables 500] [--rounds 40] [--optimizer adam]

Four ways to train the same model take turns, a block of steps each, in one process. Prints the median block times and
two ratios: with dynamic loss scaling against `MixedPrecisionLossScaleOptimizer` around the same optimizer (aim: at most
1.00), and without loss scaling against the bare optimizer (aim: at most 1.02). A ratio is the median over rounds: a
machine that is slow for a while is slow for both.
"""

from __future__ import annotations

import argparse
import os
import random
import statistics
import time

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")

import tensorflow as tf  # noqa: E402

from npu_bridge.estimator.npu.npu_loss_scale_manager import ExponentialUpdateLossScaleManager  # noqa: E402
from npu_bridge.estimator.npu.npu_optimizer import NPUOptimizer  # noqa: E402

tf1 = tf.compat.v1
INITIAL_SCALE = 2.0**15
GROWTH_PERIOD_STEPS = 2000  # the peer's default

OPTIMIZERS = {
    "adam": lambda: tf1.train.AdamOptimizer(1e-3),
    "momentum": lambda: tf1.train.MomentumOptimizer(1e-3, 0.9),
    "sgd": lambda: tf1.train.GradientDescentOptimizer(1e-3),
}


def stock_loss_scaling(optimizer):
    scale = tf1.mixed_precision.DynamicLossScale(INITIAL_SCALE, increment_period=GROWTH_PERIOD_STEPS)
    return tf1.mixed_precision.MixedPrecisionLossScaleOptimizer(optimizer, scale)


def our_loss_scaling(optimizer):
    manager = ExponentialUpdateLossScaleManager(INITIAL_SCALE, GROWTH_PERIOD_STEPS, 1, 2, 0.5)
    return NPUOptimizer(optimizer, loss_scale_manager=manager, is_loss_scale=True)


CONTENDERS = {
    "bare optimizer": lambda optimizer: optimizer,
    "NPUOptimizer": NPUOptimizer,
    "MixedPrecisionLossScaleOptimizer": stock_loss_scaling,
    "NPUOptimizer, dynamic loss scale": our_loss_scaling,
}


def build_step(wrap, make_optimizer, variable_count):
    """Returns a callable that trains one step of `variable_count` elementwise layers, in its own session."""
    graph = tf.Graph()
    with graph.as_default():
        tf1.set_random_seed(1)
        activation = tf1.random_uniform([32, 16], seed=2)
        for layer in range(variable_count):
            weight = tf1.get_variable(f"weight_{layer}", [16], initializer=tf1.ones_initializer())
            activation = activation * weight
        loss = tf.reduce_mean(tf.square(activation))
        global_step = tf1.train.get_or_create_global_step()
        optimizer = wrap(make_optimizer())
        train_op = optimizer.apply_gradients(optimizer.compute_gradients(loss), global_step=global_step)
        session = tf1.Session(config=tf1.ConfigProto(inter_op_parallelism_threads=1, intra_op_parallelism_threads=1))
        session.run(tf1.global_variables_initializer())
        return session.make_callable(train_op)


def block_secs(step, steps):
    start = time.perf_counter()
    for _ in range(steps):
        step()
    return (time.perf_counter() - start) / steps


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--variables", type=int, default=500)
    parser.add_argument("--rounds", type=int, default=40)
    parser.add_argument("--steps", type=int, default=10, help="steps in a block")
    parser.add_argument("--optimizer", choices=OPTIMIZERS, default="adam")
    arguments = parser.parse_args()

    make_optimizer = OPTIMIZERS[arguments.optimizer]
    steps = {name: build_step(wrap, make_optimizer, arguments.variables) for name, wrap in CONTENDERS.items()}
    times = {name: [] for name in steps}
    for step in steps.values():
        block_secs(step, arguments.steps)  # warm-up: graph optimisation, allocation
    names, shuffler = list(steps), random.Random(0)
    for _ in range(arguments.rounds):
        shuffler.shuffle(names)  # in a fixed order, the one after a small working set would gain
        for name in names:
            times[name].append(block_secs(steps[name], arguments.steps))

    print(
        f"{arguments.variables} variables, {arguments.optimizer}, {arguments.rounds} rounds of {arguments.steps} steps"
    )
    for name, samples in times.items():
        print(f"  {name:34s} {1000 * statistics.median(samples):7.2f} ms/step")
    for ours, peer in (
        ("NPUOptimizer, dynamic loss scale", "MixedPrecisionLossScaleOptimizer"),
        ("NPUOptimizer", "bare optimizer"),
    ):
        ratio = statistics.median(a / b for a, b in zip(times[ours], times[peer]))
        print(f"ratio {ours} / {peer}: {ratio:.3f}")


if __name__ == "__main__":
    main()
