"""Compares loss scaling in Keras' `fit` with Keras' own loss scaling: step times with many small variables.

    python benchmarks/keras_overhead.py [--layers 25] [--rounds 30] [--generation current]

Four optimizers train the same model in turns, a block of steps each, in one process: the bare one,
`KerasDistributeOptimizer` around it, `tf.keras.mixed_precision.LossScaleOptimizer` and `npu_keras_optimizer` with a
dynamic loss scale. A block is one call of the function that `fit` runs, with as many steps in it
(`steps_per_execution`), so that Keras' work between steps does not hide the difference. Prints medians of the blocks
and two ratios, as medians over the rounds: our loss scaling against Keras' (aim: at most 1.00), and the distributed
optimizer on one process against the bare one (aim: at most 1.02). `--generation keras3` uses Keras 3 instead of
`tf.keras`; it needs TensorFlow 2.16 or later.
"""

from __future__ import annotations

import argparse
import os
import random
import statistics
import time

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")

import tensorflow as tf  # noqa: E402

from npu_bridge.estimator.npu.npu_helpers import npu_keras_optimizer  # noqa: E402
from npu_bridge.estimator.npu.npu_loss_scale_manager import ExponentialUpdateLossScaleManager  # noqa: E402
from npu_bridge.estimator.npu.npu_optimizer import KerasDistributeOptimizer  # noqa: E402

INITIAL_SCALE = 2.0**15
GROWTH_PERIOD_STEPS = 2000  # the peer's default
OPTIMIZERS = {
    "current": lambda keras: keras.optimizers.Adam(1e-3),
    "legacy": lambda keras: keras.optimizers.legacy.Adam(1e-3),
    "keras3": lambda keras: keras.optimizers.Adam(1e-3),
}


def our_loss_scaling(optimizer):
    return npu_keras_optimizer(
        optimizer, ExponentialUpdateLossScaleManager(INITIAL_SCALE, GROWTH_PERIOD_STEPS, 1, 2, 0.5)
    )


def load_keras(generation):
    """Returns the package of this generation of Keras, and the class of its own loss scaling."""
    if generation != "keras3":
        return tf.keras, tf.keras.mixed_precision.LossScaleOptimizer
    import keras

    return keras, keras.optimizers.LossScaleOptimizer


def build_block(keras, optimizer, layer_count, steps):
    """Returns a callable that trains `steps` steps of a chain of small dense layers, as `fit` does."""
    keras.utils.set_random_seed(1)
    model = keras.Sequential([keras.layers.Input([16])])
    for _ in range(layer_count):
        model.add(keras.layers.Dense(16))
    model.compile(optimizer, loss="mse", steps_per_execution=steps)
    batch = tf.random.stateless_normal([32, 16], seed=[1, 2])
    batches = iter(tf.data.Dataset.from_tensors((batch, batch)).cache().repeat())
    train = model.make_train_function() or model.train_function  # Keras 3 returns nothing

    def block():
        start = time.perf_counter()
        float(train(batches)["loss"])  # reading it waits until the block is over
        return (time.perf_counter() - start) / steps

    return block


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=25, help="each has two variables")
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--steps", type=int, default=20, help="steps in a block")
    parser.add_argument("--generation", choices=OPTIMIZERS, default="current")
    arguments = parser.parse_args()

    tf.config.threading.set_inter_op_parallelism_threads(1)
    tf.config.threading.set_intra_op_parallelism_threads(1)
    keras, peer_loss_scaling = load_keras(arguments.generation)
    contenders = {
        "bare optimizer": lambda optimizer: optimizer,
        "KerasDistributeOptimizer": KerasDistributeOptimizer,
        "LossScaleOptimizer": peer_loss_scaling,
        "npu_keras_optimizer": our_loss_scaling,
    }
    make_optimizer = OPTIMIZERS[arguments.generation]
    blocks = {
        name: build_block(keras, wrap(make_optimizer(keras)), arguments.layers, arguments.steps)
        for name, wrap in contenders.items()
    }
    times = {name: [] for name in blocks}
    for block in blocks.values():
        block()  # warm-up: tracing, graph optimisation, allocation
        block()
    names, shuffler = list(blocks), random.Random(0)
    for _ in range(arguments.rounds):
        shuffler.shuffle(names)  # in a fixed order, the one after a small working set would gain
        for name in names:
            times[name].append(blocks[name]())

    print(
        f"{2 * arguments.layers} variables, {arguments.generation} Adam, {arguments.rounds} rounds of "
        f"{arguments.steps} steps"
    )
    for name, samples in times.items():
        print(f"  {name:26s} {1000 * statistics.median(samples):7.2f} ms/step")
    for ours, peer in (
        ("npu_keras_optimizer", "LossScaleOptimizer"),
        ("KerasDistributeOptimizer", "bare optimizer"),
    ):
        ratio = statistics.median(a / b for a, b in zip(times[ours], times[peer]))
        print(f"ratio {ours} / {peer}: {ratio:.3f}")


if __name__ == "__main__":
    main()
