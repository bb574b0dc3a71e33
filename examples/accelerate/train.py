"""Trains first in low precision, then in float32: one session, one switch, one picture.

python examples/accelerate/train.py                                  # 90 % of the steps in float16
python examples/accelerate/train.py --low bfloat16 --ratio 0.5       # half of them in bfloat16
python examples/accelerate/train.py --way loss --target_loss 0.5     # float16 until the loss is near its target
"""

from __future__ import annotations

import argparse
import logging
import os
import sys

import numpy as np
from picture import draw

from npu_bridge.estimator.npu.npu_config import ExperimentalConfig, NPURunConfig
from npu_bridge.estimator.npu.npu_estimator import NPUEstimator
from npu_bridge.estimator.npu.npu_hook import TellMeStepOrLossHook
from npu_bridge.estimator.npu.npu_loss_scale_manager import ExponentialUpdateLossScaleManager
from npu_bridge.estimator.npu.npu_optimizer import NPUOptimizer
from npu_bridge.npu_init import tf
from npu_bridge.reporting import History, HistoryHook, summarize

FEATURES, CLASSES, EXAMPLES = 32, 10, 4096
ACCELERATIONS = {"float16": "fast", "bfloat16": "fast1"}


def read_flags(arguments=None):
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--way", choices=("step", "loss"), default="step", help="what ends the low precision")
    parser.add_argument("--low", choices=ACCELERATIONS, default="float16", help="the low precision")
    parser.add_argument("--ratio", default="", help="share of the steps, or multiple of the target loss")
    parser.add_argument("--target_loss", type=float, default=0.5, help="for --way loss")
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--batch_size", type=int, default=64)
    parser.add_argument("--output_dir", help="default: out/accelerate/LOW_WAY; continues from its checkpoint")
    flags = parser.parse_args(arguments)
    flags.output_dir = flags.output_dir or f"out/accelerate/{flags.low}_{flags.way}"
    return flags


def input_fn(batch_size, seed=1):
    """Returns points labelled by a fixed random network, with a little noise: a task that takes a while to learn."""
    random = np.random.RandomState(seed)
    inputs = random.randn(EXAMPLES, FEATURES).astype(np.float32)
    teacher = np.maximum(inputs @ random.randn(FEATURES, 24), 0) @ random.randn(24, CLASSES)
    labels = np.argmax(teacher + 2.0 * random.randn(EXAMPLES, CLASSES), axis=1)
    dataset = tf.data.Dataset.from_tensor_slices(({"inputs": inputs}, labels))
    return dataset.shuffle(EXAMPLES, seed=seed).repeat().batch(batch_size)


def model_fn(features, labels, mode):
    layer = features["inputs"]
    for number in range(2):
        layer = tf.nn.relu(dense(layer, 128, f"hidden_{number}"))
    logits = dense(layer, CLASSES, "logits")
    loss = tf.identity(tf.losses.sparse_softmax_cross_entropy(labels, logits), name="loss")
    train_op = None
    if mode == tf.estimator.ModeKeys.TRAIN:
        # float16 has few exponents, so gradients are scaled; the switch keeps the scale.
        manager = ExponentialUpdateLossScaleManager(2.0**15, 1000, decr_every_n_nan_or_inf=1, decr_ratio=0.5)
        optimizer = NPUOptimizer(tf.train.AdamOptimizer(2e-3), loss_scale_manager=manager, is_loss_scale=True)
        train_op = optimizer.minimize(loss, tf.train.get_or_create_global_step())
    return tf.estimator.EstimatorSpec(mode, loss=loss, train_op=train_op)


def dense(inputs, units, name):
    with tf.variable_scope(name):
        kernel = tf.get_variable("kernel", [inputs.shape[-1], units], initializer=tf.glorot_uniform_initializer())
        bias = tf.get_variable("bias", [units], initializer=tf.zeros_initializer())
        return tf.matmul(inputs, kernel) + bias


def main():
    flags = read_flags()
    log = logging.getLogger("npu_bridge")  # prints when each precision begins
    log.addHandler(logging.StreamHandler(sys.stdout))
    log.setLevel(logging.INFO)
    plan = f"{ACCELERATIONS[flags.low]}|{flags.way}|{flags.ratio}"
    config = NPURunConfig(
        model_dir=flags.output_dir,
        save_checkpoints_steps=max(flags.steps, 1),
        tf_random_seed=1,
        experimental_config=ExperimentalConfig(accelerate_train_mode=plan),
    )
    estimator = NPUEstimator(model_fn, config=config)
    if flags.way == "step":
        progress = TellMeStepOrLossHook(step="global_step:0", total_step=flags.steps)
    else:
        progress = TellMeStepOrLossHook(loss="loss:0", final_loss=flags.target_loss)
    history = History(os.path.join(flags.output_dir, "history.jsonl"))
    checkpoint = estimator.latest_checkpoint()
    reached = int(tf.train.load_variable(checkpoint, tf.GraphKeys.GLOBAL_STEP)) if checkpoint else 0
    if reached >= flags.steps:
        print(f"already at step {reached} of {flags.steps}: nothing to do; --steps {2 * reached} or another folder")
        return
    estimator.train(lambda: input_fn(flags.batch_size), hooks=[progress, HistoryHook(history)], max_steps=flags.steps)
    result = estimator.evaluate(lambda: input_fn(flags.batch_size), steps=8)
    target_loss = flags.target_loss if flags.way == "loss" else None
    picture = draw(history, os.path.join(flags.output_dir, "curves.svg"), target_loss)
    summary = summarize(history)
    print(
        f"loss {summary.first_loss:.3f} -> {summary.last_loss:.3f}, evaluated in float32 {result['loss']:.3f}; "
        f"see {picture} and {os.path.join(flags.output_dir, 'report.html')}"
    )


if __name__ == "__main__":
    main()
