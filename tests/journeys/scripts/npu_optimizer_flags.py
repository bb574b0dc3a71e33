"""Trains a line with NPUOptimizer; the flags choose loss scaling and distribution, as in BERT scripts."""

import os
import sys

import numpy as np

sys.path.insert(0, os.getcwd())
from npu_bridge.estimator.npu.npu_loss_scale_manager import (  # noqa: E402
    ExponentialUpdateLossScaleManager,
    FixedLossScaleManager,
)
from npu_bridge.npu_init import *  # noqa: E402,F403

flags = tf.flags  # noqa: F405
FLAGS = flags.FLAGS
flags.DEFINE_float("npu_bert_loss_scale", 0, "-1 off, 0 dynamic, from 1 on the fixed scale itself")
flags.DEFINE_integer("init_loss_scale_value", 2**16, "first scale of dynamic loss scaling")
flags.DEFINE_bool("distributed", False, "average gradients over the ranks")
flags.DEFINE_bool("npu_bert_npu_tail_optimize", False, "hide the tail of the gradient aggregation")


def create_optimizer(loss, learning_rate):
    optimizer = tf.train.MomentumOptimizer(learning_rate, 0.9)  # noqa: F405
    if FLAGS.npu_bert_loss_scale not in [None, -1]:
        opt_tmp = optimizer
        if FLAGS.npu_bert_loss_scale == 0:
            loss_scale_manager = ExponentialUpdateLossScaleManager(
                init_loss_scale=FLAGS.init_loss_scale_value,
                incr_every_n_steps=20,
                decr_every_n_nan_or_inf=2,
                decr_ratio=0.5,
            )
        elif FLAGS.npu_bert_loss_scale >= 1:
            loss_scale_manager = FixedLossScaleManager(loss_scale=FLAGS.npu_bert_loss_scale)
        else:
            raise ValueError("npu_bert_loss_scale must be -1, 0, or at least 1")
        optimizer = NPUOptimizer(  # noqa: F405
            opt_tmp,
            loss_scale_manager,
            is_distributed=FLAGS.distributed,
            is_loss_scale=True,
            is_tailing_optimization=FLAGS.npu_bert_npu_tail_optimize,
        )
    else:
        optimizer = NPUOptimizer(optimizer, is_distributed=FLAGS.distributed)  # noqa: F405
    global_step = tf.train.get_or_create_global_step()  # noqa: F405
    grads_and_vars = optimizer.compute_gradients(loss)
    grads, variables = zip(*grads_and_vars)
    grads, _ = tf.clip_by_global_norm(grads, clip_norm=1.0)  # noqa: F405
    return optimizer.apply_gradients(zip(grads, variables), global_step=global_step)


def main(_):
    tf.disable_eager_execution()  # noqa: F405
    inputs = np.linspace(-1, 1, 32, dtype=np.float32)
    slope = tf.get_variable("slope", [], initializer=tf.zeros_initializer())  # noqa: F405
    loss = tf.reduce_mean(tf.square(slope * inputs - 2 * inputs))  # noqa: F405
    train_op = create_optimizer(loss, 0.1)
    names = [op.name for op in tf.get_default_graph().get_operations()]  # noqa: F405
    scale = "loss_scale:0" if "loss_scale" in names else None
    with tf.Session() as session:  # noqa: F405
        session.run(tf.global_variables_initializer())  # noqa: F405
        first_loss, first_scale = session.run(loss), session.run(scale) if scale else None
        for _ in range(30):
            session.run(train_op)
        print("scale", first_scale, "->", session.run(scale) if scale else None)
        print("loss fell:", session.run(loss) < first_loss)


if __name__ == "__main__":
    tf.app.run()  # noqa: F405
