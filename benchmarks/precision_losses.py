"""Prints the losses of three small trainings in float32, and with float16 and bfloat16 imitated, as a table.

    TF_ENABLE_ONEDNN_OPTS=0 python benchmarks/precision_losses.py [--steps 300] [--seed 1]

Without oneDNN, TensorFlow lowers nothing to bfloat16 on any processor, so the numbers do not depend on it. The models:
the convolutional network of `examples/digits`, the BERT of `configs/bert_tiny.toml` on rows in which each token follows
from the previous one, and an LSTM that reads a digit row by row. All train with Adam under a loss scale, from equal
variables on equal batches; a loss is the mean of the 20 steps up to the named one.
"""

from __future__ import annotations

import argparse
import os
import pathlib
import sys

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")

import numpy as np  # noqa: E402

from npu_bridge.npu_init import ExponentialUpdateLossScaleManager, NPUOptimizer, tf  # noqa: E402
from npu_bridge.options import read_session_config, with_optimizer_entry  # noqa: E402
from npu_bridge.session.precision import Precision, attach_precision  # noqa: E402

EXAMPLES = pathlib.Path(__file__).parent.parent / "examples"
MODES = {"float32": "origin", "float16, imitated": "mixed_float16", "bfloat16, imitated": "mixed_bfloat16"}
BATCH = 32


def pictures(random):
    """Returns a batch of digits: pictures and labels."""
    from digits import load

    inputs, labels = load()[0]
    chosen = random.randint(len(labels), size=BATCH)
    return {"pictures": inputs[chosen], "labels": labels[chosen]}


def rows(random):
    """Returns rows of 32 tokens, each 5 more than 3 times the previous one; four of them are to be predicted."""
    tokens = random.randint(512, size=[BATCH, 1])
    for _ in range(31):
        tokens = np.concatenate([tokens, (3 * tokens[:, -1:] + 5) % 512], 1)
    places = np.stack([random.choice(32, 4, replace=False) for _ in range(BATCH)])
    targets = np.take_along_axis(tokens, places, 1)
    np.put_along_axis(tokens, places, 513, 1)
    return {"tokens": tokens.astype(np.int32), "places": places.astype(np.int32), "targets": targets.astype(np.int32)}


def digits(fed):
    from network import logits_of

    return tf.losses.sparse_softmax_cross_entropy(fed["labels"], logits_of(fed["pictures"]))


def recurrent(fed):
    cell = tf.nn.rnn_cell.LSTMCell(64, initializer=tf.glorot_uniform_initializer(seed=1))
    outputs, _ = tf.nn.dynamic_rnn(cell, fed["pictures"][..., 0], dtype=tf.float32)
    kernel = tf.get_variable("kernel", [64, 10], initializer=tf.glorot_uniform_initializer(seed=2))
    return tf.losses.sparse_softmax_cross_entropy(fed["labels"], tf.matmul(outputs[:, -1], kernel))


def bert(fed):
    from model import ModelSize, masked_language_model

    features = {"token_ids": fed["tokens"], "segment_ids": tf.zeros_like(fed["tokens"])}
    features.update(target_positions=fed["places"], target_ids=fed["targets"], target_weights=tf.ones([BATCH, 4]))
    return masked_language_model(features, ModelSize(2048, 128, 2, 2, 512, 64), training=True).loss


MODELS = {"digits": (digits, pictures), "LSTM": (recurrent, pictures), "BERT tiny": (bert, rows)}


def train(name, mode, steps, seed):
    """Returns the losses of all steps."""
    model, draw = MODELS[name]
    random = np.random.RandomState(seed)
    precision = Precision(read_session_config(with_optimizer_entry(None, {"precision_mode_v2": mode})))
    with tf.Graph().as_default() as graph:
        tf.set_random_seed(seed)
        fed = {key: tf.placeholder(value.dtype, value.shape) for key, value in draw(random).items()}
        loss = model(fed)
        manager = ExponentialUpdateLossScaleManager(2**15, 1000, decr_every_n_nan_or_inf=1)
        optimizer = NPUOptimizer(tf.train.AdamOptimizer(1e-3), manager, is_loss_scale=True)
        train_op = optimizer.minimize(loss)
        precision.prepare(config := tf.ConfigProto())
        with tf.Session(graph=graph, config=config) as session:
            attach_precision(session, precision)
            session.run(tf.global_variables_initializer())
            return [
                session.run([loss, train_op], {fed[key]: value for key, value in draw(random).items()})[0]
                for _ in range(steps)
            ]


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--seed", type=int, default=1)
    arguments = parser.parse_args()
    sys.path[:0] = [str(EXAMPLES / "digits"), str(EXAMPLES / "bert_pretrain")]
    steps = [step for step in (20, arguments.steps // 3, arguments.steps) if step >= 20]
    print("| model | dtype | " + " | ".join(f"loss at step {step}" for step in steps) + " |")
    print("| --- | --- |" + " --- |" * len(steps))
    for name in MODELS:
        for words, mode in MODES.items():
            losses = train(name, mode, arguments.steps, arguments.seed)
            means = (f"{np.mean(losses[step - 20 : step]):.4f}" for step in steps)
            print(f"| {name} | {words} | {' | '.join(means)} |", flush=True)


if __name__ == "__main__":
    main()
