"""Measures the cost of saving: checkpoints on the disk, and copies in memory for a job that survives lost ranks.

    python benchmarks/checkpoints.py [--layers 5] [--width 2000] [--rounds 10] [--steps 100]

Four ways to train the same model take turns, a block of steps each, in one process: without a saver, with the stock
saver hook, with ours (in the background), and with the hooks of an elastic job (`StopHook`, `MemoryCheckpointHook`).
The saver hooks save once in a block. Prints median times of a step, the longest step of a block with a checkpoint, and
the ratios to no saver: the median over rounds (aims: at most 1.02 with our saver, 1.01 in an elastic job).
"""

from __future__ import annotations

import argparse
import os
import random
import statistics
import tempfile
import time

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")

import tensorflow as tf  # noqa: E402

from npu_bridge.base.environment import MEMORY_FOLDER  # noqa: E402
from npu_bridge.base.memory_folders import make_memory_folder  # noqa: E402
from npu_bridge.estimator.npu.npu_hook import NPUCheckpointSaverHook  # noqa: E402
from npu_bridge.estimator.npu.npu_optimizer import NPUOptimizer  # noqa: E402
from npu_bridge.session import MemoryCheckpointHook, StopHook  # noqa: E402

tf1 = tf.compat.v1
NOTHING, STOCK, OURS, ELASTIC = "no saver", "stock saver hook", "NPUCheckpointSaverHook", "elastic job"


class Training:
    """A model in a session with some hooks."""

    def __init__(self, name, folder, arguments):
        self.secs_per_step, self.longest_secs = [], []
        path = os.path.join(folder, name)
        hooks = {
            NOTHING: lambda: [],
            STOCK: lambda: [tf.estimator.CheckpointSaverHook(path, save_steps=arguments.steps)],
            OURS: lambda: [NPUCheckpointSaverHook(path, save_steps=arguments.steps)],
            ELASTIC: lambda: [StopHook(leaves=False), MemoryCheckpointHook(path)],
        }[name]()
        self.copies = hooks[-1] if name == ELASTIC else None
        self._graph = tf.Graph()
        with self._graph.as_default():
            activation = tf1.random_uniform([arguments.batch, arguments.width], seed=1)
            for _ in range(arguments.layers):
                activation = tf1.layers.dense(activation, arguments.width, tf.nn.relu)
            step = tf1.train.get_or_create_global_step()
            self._op = NPUOptimizer(tf1.train.AdamOptimizer(1e-4)).minimize(tf.reduce_mean(activation), step)
            tf1.add_to_collection(tf1.GraphKeys.SAVERS, tf1.train.Saver())
            self.session = tf1.train.SingularMonitoredSession(hooks)

    def train(self, steps):
        """Trains a block of steps, and notes how long it takes."""
        began = last = time.perf_counter()
        longest = 0.0
        with self._graph.as_default():  # the stock hook looks for its saver in this graph
            for _ in range(steps):
                self.session.run(self._op)
                now = time.perf_counter()
                longest, last = max(longest, now - last), now
        self.secs_per_step.append((last - began) / steps)
        self.longest_secs.append(longest)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=5)
    parser.add_argument("--width", type=int, default=2000)
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--steps", type=int, default=100, help="steps in a block, and between two checkpoints")
    arguments = parser.parse_args()

    memory = make_memory_folder()
    if memory is not None:
        os.environ[MEMORY_FOLDER] = memory.path
    with tempfile.TemporaryDirectory() as folder:
        trainings = {name: Training(name, folder, arguments) for name in (NOTHING, STOCK, OURS, ELASTIC)}
        for training in trainings.values():
            training.train(arguments.steps)  # warm-up
            training.secs_per_step.clear(), training.longest_secs.clear()
        names, shuffler = list(trainings), random.Random(0)
        for _ in range(arguments.rounds):
            shuffler.shuffle(names)
            for name in names:
                trainings[name].train(arguments.steps)
        runs = trainings[ELASTIC].copies.every_n_runs
        for training in trainings.values():
            training.session.close()
    if memory is not None:
        memory.close()

    millions = arguments.layers * arguments.width**2 / 1e6
    print(f"{millions:.1f} million parameters, Adam, a checkpoint every {arguments.steps} steps; a copy every {runs}")
    for name, training in trainings.items():
        median, longest = (1000 * statistics.median(each) for each in (training.secs_per_step, training.longest_secs))
        print(f"  {name:24s} {median:8.2f} ms/step, longest {longest:8.1f} ms")
    bare = trainings[NOTHING].secs_per_step
    for name in (STOCK, OURS, ELASTIC):
        ratio = statistics.median(a / b for a, b in zip(trainings[name].secs_per_step, bare))
        print(f"ratio {name} / {NOTHING}: {ratio:.3f}")


if __name__ == "__main__":
    main()
