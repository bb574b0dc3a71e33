"""What cases share: values of tensors, and names of variables."""

from __future__ import annotations

import numpy as np
import tensorflow.compat.v1 as tf


def value(tensors, feeds=None, start=True):
    """Values of tensors in a new session with initialised variables and tables."""
    with tf.Session() as session:
        if start:
            session.run([tf.global_variables_initializer(), tf.local_variables_initializer(), tf.tables_initializer()])
        return session.run(tensors, feeds)


def names():
    """Names of all variables, sorted."""
    return sorted(var.op.name for var in tf.global_variables())


def close(found, expected, tolerance=1e-5):
    """Both are the same but for rounding."""
    np.testing.assert_allclose(found, expected, rtol=tolerance, atol=tolerance)


def sigmoid(x):
    return 1 / (1 + np.exp(-np.asarray(x)))


def run_updates(optimizer, start, grads, steps=1, resource=False, step=None):
    """The weights and slots by name after `steps` updates with constant gradients (an array, or (values, rows))."""
    weights = tf.get_variable("w", initializer=np.asarray(start, np.float32), use_resource=resource)
    if isinstance(grads, tuple):
        values, rows = grads
        gradient = tf.IndexedSlices(tf.constant(values, tf.float32), tf.constant(rows), tf.shape(weights))
    else:
        gradient = tf.constant(grads, tf.float32)
    train = optimizer.apply_gradients([(gradient, weights)], **({} if step is None else {"global_step": step}))
    with tf.Session() as session:
        session.run(tf.global_variables_initializer())
        for _ in range(steps):
            session.run(train)
        return session.run(weights), session.run({var.op.name: var for var in tf.global_variables()})
