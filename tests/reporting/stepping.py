"""A graph that acts like a training step whose losses and overflows are written down in advance."""

from __future__ import annotations

import tensorflow as tf

from npu_bridge.gradients.collections import LOSS_SCALE, STEP_SKIPPED, UNSCALED_LOSS


class Clock:
    """Time that stands still until it is moved, or moves by a fixed amount at each look."""

    def __init__(self, start=0.0, per_look=0.0):
        self.now = start
        self.per_look = per_look

    def __call__(self):
        self.now += self.per_look
        return self.now


def build_steps(losses, skipped=None, scales=None):
    """Adds a train op to the default graph; its n-th run shows the n-th entry of each list."""
    run = tf.compat.v1.get_variable("run", [], tf.int32, tf.compat.v1.zeros_initializer(), trainable=False)
    global_step = tf.compat.v1.train.get_or_create_global_step()
    now = tf.identity(run)
    is_skipped = tf.gather(tf.constant([False] * len(losses) if skipped is None else skipped), now)
    loss = tf.gather(tf.constant(losses, tf.float32), now, name="the_loss")
    tf.compat.v1.add_to_collection(UNSCALED_LOSS, loss)
    if skipped is not None:
        tf.compat.v1.add_to_collection(STEP_SKIPPED, is_skipped)
    if scales is not None:
        tf.compat.v1.add_to_collection(LOSS_SCALE, tf.gather(tf.constant(scales, tf.float32), now))
    with tf.control_dependencies([now, loss, is_skipped]):
        moved = tf.compat.v1.assign_add(
            global_step, tf.where(is_skipped, tf.constant(0, tf.int64), tf.constant(1, tf.int64))
        )
        return tf.group(moved, tf.compat.v1.assign_add(run, 1))


def run_steps(hooks, losses, skipped=None, scales=None, between=None):
    """Builds the graph and runs it once per loss, in a monitored session, as Estimator uses it."""
    with tf.Graph().as_default():
        train_op = build_steps(losses, skipped, scales)
        with tf.compat.v1.train.MonitoredSession(hooks=hooks) as monitored:
            for number in range(len(losses)):
                monitored.run(train_op)
                if between:
                    between(number)
