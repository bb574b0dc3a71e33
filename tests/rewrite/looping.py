"""Training steps to be put in loops, and sessions that start again from one state."""

from __future__ import annotations

import numpy as np
import tensorflow as tf

from npu_bridge.estimator.npu.npu_loss_scale_manager import ExponentialUpdateLossScaleManager
from npu_bridge.estimator.npu.npu_optimizer import NPUOptimizer

tf1 = tf.compat.v1
BATCHES = 12


def batches(poisoned=(), repeats=1):
    """An iterator's next batch of images; every number of a poisoned batch is infinite."""
    images = np.random.RandomState(0).randn(BATCHES, 4, 8, 8, 2).astype("f")
    for number in poisoned:
        images[number] = np.inf
    iterator = tf1.data.make_initializable_iterator(tf.data.Dataset.from_tensor_slices(images).repeat(repeats))
    tf1.add_to_collection("iterators", iterator.initializer)
    return iterator.get_next()


def dense(x):
    return tf1.layers.dense(tf1.layers.flatten(x), 3, tf.nn.relu)


def convolutional(x):
    x = tf1.layers.conv2d(x, 4, 3, activation=tf.nn.relu)
    x = tf1.layers.batch_normalization(x, training=True, fused=True)
    return tf1.layers.max_pooling2d(x, 2, 2)


def embedded(x):
    table = tf1.get_variable("table", [20, 4])
    return tf.nn.embedding_lookup(table, tf.cast(tf.abs(x[:, 0, :, 0]) * 5, tf.int32) % 20)


def attention(x):
    x = tf1.layers.dense(tf.reshape(x, [-1, 16, 8]), 8)
    x += tf.matmul(tf.nn.softmax(tf.matmul(x, x, transpose_b=True) / 8.0), x)
    x = tf1.layers.batch_normalization(x, training=True)
    return tf1.layers.dense(x, 4, lambda y: 0.5 * y * (1.0 + tf.math.erf(y / 2.0**0.5)))


MODELS = {model.__name__: model for model in (dense, convolutional, embedded, attention)}


def loss_scaled(optimizer):
    manager = ExponentialUpdateLossScaleManager(1024, 2, 1, 2, 0.5)
    return NPUOptimizer(optimizer, loss_scale_manager=manager, is_loss_scale=True)


def train_op_of(model, optimizer, poisoned=(), repeats=1):
    tf1.set_random_seed(3)
    global_step = tf1.train.get_or_create_global_step()
    loss = tf.reduce_mean(tf.square(model(batches(poisoned, repeats))))
    train_op = optimizer.minimize(loss, global_step)
    return tf.group(train_op, *tf1.get_collection(tf1.GraphKeys.UPDATE_OPS))


class Fresh:
    """A session of the default graph that can start again from one state."""

    def __init__(self):
        self.session = tf1.Session()
        self.session.run(tf1.global_variables_initializer())
        self._saver = {variable: self.session.run(variable) for variable in tf1.global_variables()}
        self.restart()

    def restart(self):
        self.session.run(tf1.get_collection("iterators"))
        for variable, value in self._saver.items():
            self.session.run(variable.initializer, {variable.initializer.inputs[1]: value})

    def values(self):
        return {variable.name: self.session.run(variable) for variable in tf1.global_variables()}


def values_one_by_one_and_in(loop, train_op, steps):
    """Values of the variables after so many single steps, and after a run of the loop from the same start."""
    fresh = Fresh()
    with fresh.session as session:
        for _ in range(steps):
            session.run(train_op)
        one_by_one = fresh.values()
        fresh.restart()
        session.run(loop.op, {loop.count: steps})
        return one_by_one, fresh.values()
