"""A training, the same with any number of ranks, that does harm to itself at certain steps."""

from __future__ import annotations

import numpy as np

from tests.npu_run.launching import npu_run, write_script

# Faults are rank:step:signal, each once; at signal 0, steps only become slow.
TRAINING = """
import os, sys, time
import numpy as np
import tensorflow as tf
from npu_bridge.npu_init import *
from npu_bridge.session import GlobalBatches

folder, steps, faults = sys.argv[1], 120, sys.argv[2:]
random = np.random.RandomState(0)
x = random.randn(600, 12).astype("f")
y = np.sin(x).sum(1, keepdims=True)
batches = GlobalBatches(rows=600, batch=48, micro=8, seed=1)  # 6 micro-batches
was_sent = []


class Faults(tf.train.SessionRunHook):
    def after_run(self, context, values):
        step = int(context.session.run(tf.train.get_global_step()))
        if was_sent:
            time.sleep(0.1)  # a busy machine takes a while until the launcher has heard
        for fault in faults:
            rank, when, number = map(int, fault.split(":"))
            if rank == get_rank_id() and step == when and not os.path.exists(f"{folder}.{fault}"):
                open(f"{folder}.{fault}", "w").close()
                print("suffers", fault, flush=True)
                was_sent.append(number)
                os.kill(os.getppid() if number == 15 else os.getpid(), abs(number))


def model_fn(features, labels, mode):
    init = tf.glorot_uniform_initializer(seed=1)
    hidden = tf.layers.dense(features, 16, tf.nn.tanh, kernel_initializer=init)
    loss = tf.losses.mean_squared_error(labels, tf.layers.dense(hidden, 1, kernel_initializer=init))
    manager = ExponentialUpdateLossScaleManager(2.0**127, 20, 1, 2.0, 0.5)  # the first steps overflow
    optimizer = NPUOptimizer(
        tf.train.AdamOptimizer(0.01), manager, is_loss_scale=True, is_distributed=True, stages=batches.stages()
    )
    op = optimizer.minimize(loss, tf.train.get_or_create_global_step())
    return tf.estimator.EstimatorSpec(mode, loss=loss, train_op=op)


config = NPURunConfig(model_dir=folder, save_checkpoints_steps=25)
NPUEstimator(model_fn, config=config).train(lambda: batches.dataset((x, y), folder), [Faults()], max_steps=steps)
if get_rank_id() == 0:
    reader = tf.train.load_checkpoint(tf.train.latest_checkpoint(folder))
    names = [name for name in reader.get_variable_to_shape_map() if "dense" in name and "accum" not in name]
    np.savez(folder + ".npz", **{name: reader.get_tensor(name) for name in names})
"""
# For `npu-run`, which looks for slots more often.
QUICK = "from npu_run.job import elastic\nelastic.STEADY_SECS, elastic._POLL_SECS = 0.0, 0.1\n"


def train_undisturbed(place):
    """Trains on one rank; returns the weights."""
    write_script(place, TRAINING)
    code, output = npu_run("train.py", "out", cwd=place)
    assert code == 0, output
    with np.load(place / "out.npz") as weights:
        return dict(weights)


def assert_alike(path, expected):
    """Compares the weights that a training has left with those of another one, up to rounding."""
    with np.load(path) as found:
        assert set(found) == set(expected)
        for name, value in expected.items():
            assert np.max(np.abs(found[name] - value)) <= 1e-5 * max(np.max(np.abs(value)), 1e-3), name
