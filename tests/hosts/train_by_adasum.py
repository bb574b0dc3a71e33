"""Trains one vector with gradients that are known, by momentum and Adasum of updates; prints some of what is left."""

import hashlib
import json
import os

import numpy as np
import tensorflow as tf

PARAMETERS, STEPS, RATE, MOMENTUM = 500_000, 8, 0.1, 0.9


def gradients_of(rank):
    """Returns one gradient for each step; those of different ranks have a common part."""
    common = np.random.RandomState(100).randn(PARAMETERS)
    own = np.random.RandomState(rank).randn(PARAMETERS)
    return [(common + (1 + step) * own).astype(np.float32) for step in range(STEPS)]


def main():
    from npu_bridge.npu_init import NPUDistributedOptimizer
    from npu_bridge.stages import Adasum

    tf1 = tf.compat.v1
    tf1.disable_eager_execution()
    weight = tf1.get_variable("weight", [PARAMETERS], initializer=tf1.zeros_initializer())
    grad = tf1.placeholder(tf.float32, [PARAMETERS])
    inner = tf1.train.MomentumOptimizer(RATE, MOMENTUM)
    optimizer = NPUDistributedOptimizer(inner, stages=[Adasum("host", on="weights")])
    train_op = optimizer.minimize(tf.reduce_sum(weight * grad))
    with tf1.Session() as session:
        session.run(tf1.global_variables_initializer())
        for value in gradients_of(int(os.environ["RANK_ID"])):
            session.run(train_op, {grad: value})
        values, velocity = session.run([weight, inner.get_slot(weight, "momentum")])
    shown = slice(None, None, PARAMETERS // 100)
    digest = hashlib.sha256(values.tobytes()).hexdigest()
    print("result", json.dumps([values[shown].tolist(), velocity[shown].tolist(), digest]))


if __name__ == "__main__":
    main()
