"""Trains a linear model whose right answer is known; rank 0 keeps checkpoints. Arguments: folder, steps, mischief.

With a mischief, rank 1 does it at step 10. After step 12, steps are slow until there is a file "go" in the folder.
"""

import hashlib
import os
import pathlib
import signal
import socket
import sys
import time

import numpy as np
import tensorflow as tf

from npu_bridge.npu_init import NPUBroadcastGlobalVariablesHook, NPUDistributedOptimizer, get_rank_id, get_rank_size

tf1 = tf.compat.v1
MISCHIEF_STEP = 10


def misbehave(mischief):
    if mischief == "raise":
        raise ValueError("bad batch")
    if mischief in ("stop", "kill"):
        os.kill(os.getpid(), signal.SIGSTOP if mischief == "stop" else signal.SIGKILL)


def main(folder, steps, mischief):
    rank, size = int(os.environ["RANK_ID"]), int(os.environ["RANK_SIZE"])
    random = np.random.default_rng(rank)
    inputs = random.normal(size=[64, 200_000 // 64]).astype(np.float32)
    wanted = np.linspace(-1, 1, inputs.shape[1], dtype=np.float32)
    weight = tf1.get_variable("weight", [inputs.shape[1]], initializer=tf1.zeros_initializer())
    ballast = tf1.get_variable("ballast", [250_000], initializer=tf1.ones_initializer())  # bytes to send
    features = tf1.placeholder(tf.float32, inputs.shape)
    error = tf.linalg.matvec(features, weight - wanted)
    loss = tf.reduce_mean(tf.square(error)) / inputs.shape[1] + 1e-3 * tf.reduce_mean(tf.square(ballast))
    step = tf1.train.get_or_create_global_step()
    train_op = NPUDistributedOptimizer(tf1.train.GradientDescentOptimizer(10.0)).minimize(loss, global_step=step)
    assert (get_rank_id(), get_rank_size()) == (rank, size)
    hooks = [NPUBroadcastGlobalVariablesHook(0)]
    hooks += [tf1.train.CheckpointSaverHook(folder, save_steps=4)] if rank == 0 else []
    config = tf1.ConfigProto(inter_op_parallelism_threads=2, intra_op_parallelism_threads=1)
    with tf1.train.MonitoredTrainingSession(hooks=hooks, config=config) as session:
        for number in range(steps):
            if rank == 1 and number == MISCHIEF_STEP:
                misbehave(mischief)
            value, _ = session.run([loss, train_op], {features: inputs})
            if number == MISCHIEF_STEP + 2:
                pathlib.Path(folder, f"running.{rank}").touch()
            if number >= MISCHIEF_STEP + 2 and not os.path.exists(f"{folder}/go"):
                time.sleep(0.1)
            if number in (0, steps - 1):
                print(f"loss {value:.6f}")
        weights = b"".join(array.tobytes() for array in session.run([weight, ballast]))
    print(f"host {socket.gethostname()} weights {hashlib.sha256(weights).hexdigest()}")


if __name__ == "__main__":
    tf1.disable_eager_execution()
    main(sys.argv[1], int(sys.argv[2]), sys.argv[3] if len(sys.argv) > 3 else "")
