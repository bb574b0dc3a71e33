"""Trains a Keras model on any number of ranks, with loss scaling: compile, fit, save, resume.

python examples/keras_fit/train.py                         # one process
npu-run -np 2 examples/keras_fit/train.py                  # two ranks that share every batch
python examples/keras_fit/train.py --float16               # layers compute in float16
python examples/keras_fit/train.py --steps 600             # resumes from out/keras_fit/model.keras, if it exists

An interrupted run resumes likewise, and ends with the same weights as an uninterrupted one.
"""

from __future__ import annotations

import argparse
import pathlib

import numpy as np

from npu_bridge.npu_init import (
    ExponentialUpdateLossScaleManager,
    get_npu_rank_id,
    get_npu_rank_size,
    npu_callbacks_append,
    npu_keras_optimizer,
)
from npu_bridge.session import ResumeCallback

# isort: split
import tensorflow as tf  # after npu_bridge, which hides TensorFlow's notes about its own build

# Ten digits as seven segments: top, upper left, upper right, middle, lower left, lower right, bottom.
SEGMENTS = [
    "1110111",
    "0010010",
    "1011101",
    "1011011",
    "0111010",
    "1101011",
    "1101111",
    "1010010",
    "1111111",
    "1111011",
]
BOXES = [(0, 1, 1, 7), (1, 5, 0, 1), (1, 5, 7, 8), (5, 6, 1, 7), (6, 10, 0, 1), (6, 10, 7, 8), (10, 11, 1, 7)]
IMAGES = 4096


def read_flags():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=300, help="steps of the whole training")
    parser.add_argument("--batch_size", type=int, default=64, help="of all ranks together")
    parser.add_argument("--save_steps", type=int, default=100, help="steps between two saves of the model")
    parser.add_argument("--float16", action="store_true", help="layers compute in float16, variables stay float32")
    parser.add_argument("--output_dir", type=pathlib.Path, default="out/keras_fit")
    return parser.parse_args()


def make_digits(seed=1):
    """Returns noisy pictures of the ten digits (float32, 14 x 12), anywhere in the frame, and the digits."""
    random = np.random.RandomState(seed)
    digits = random.randint(0, 10, IMAGES)
    pictures = random.randn(IMAGES, 14, 12).astype(np.float32) * 0.5
    for picture, digit in zip(pictures, digits):
        down, right = random.randint(0, 4), random.randint(0, 5)
        for is_lit, (top, bottom, left, end) in zip(SEGMENTS[digit], BOXES):
            if is_lit == "1":
                picture[down + top : down + bottom, right + left : right + end] += 1.5
    return pictures[..., np.newaxis], digits


def share_of_this_rank(pictures, digits, batch_size, done):
    """Yields endless batches from number `done` on. Every rank shuffles alike and takes its own part of each batch."""
    size, rank = get_npu_rank_size(), get_npu_rank_id()
    whole = tf.data.Dataset.from_tensor_slices((pictures, digits)).shuffle(IMAGES, seed=1).repeat()
    return whole.skip(done * batch_size).shard(size, rank).batch(batch_size // size, drop_remainder=True)


def make_model():
    return tf.keras.Sequential(
        [
            tf.keras.layers.Input([14, 12, 1]),
            tf.keras.layers.Conv2D(8, 3, activation="relu"),
            tf.keras.layers.MaxPool2D(),
            tf.keras.layers.Flatten(),
            tf.keras.layers.Dense(64, activation="relu"),
            tf.keras.layers.Dense(10, dtype="float32"),  # logits and loss in float32, whatever the layers compute in
        ]
    )


def new_compiled_model():
    manager = ExponentialUpdateLossScaleManager(init_loss_scale=2**15, incr_every_n_steps=1000)
    optimizer = npu_keras_optimizer(tf.keras.optimizers.Adam(5e-3), manager)
    model = make_model()
    loss = tf.keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(optimizer, loss=loss, metrics=["accuracy"])
    return model


class ShowProgress(tf.keras.callbacks.Callback):
    """Prints at intervals the mean loss and accuracy since the epoch began, the loss scale and the skipped steps."""

    def __init__(self, first_step, last_step, every_steps=50):
        super().__init__()
        self._first_step, self._last_step, self._every_steps = first_step, last_step, every_steps

    def on_train_batch_end(self, batch, logs=None):
        step = self._first_step + batch + 1
        if step % self._every_steps == 0 or step in (self._first_step + 1, self._last_step):
            optimizer = self.model.optimizer
            print(
                f"step {step}/{self._last_step}  mean loss {logs['loss']:.4f}  accuracy {logs['accuracy']:.1%}  "
                f"loss scale {float(optimizer.loss_scale):g}  skipped {int(optimizer.skipped_steps)}",
                flush=True,
            )


def main():
    flags = read_flags()
    is_first = get_npu_rank_id() == 0
    if flags.float16:
        tf.keras.mixed_precision.set_global_policy("mixed_float16")
    tf.keras.utils.set_random_seed(1)
    model, saved = new_compiled_model(), flags.output_dir / "model.keras"
    resume = ResumeCallback(saved, flags.save_steps)
    first_step = resume.restore(model)  # on rank 0; the other ranks get everything through npu_callbacks_append
    if is_first and first_step:
        print(f"resuming from {saved}, step {int(model.optimizer.iterations)}")

    callbacks = npu_callbacks_append([resume, *([ShowProgress(first_step, flags.steps)] if is_first else [])])
    dataset = share_of_this_rank(*make_digits(), flags.batch_size, first_step)
    if first_step < flags.steps:
        model.fit(dataset, steps_per_epoch=flags.steps - first_step, callbacks=callbacks, verbose=0)
    elif is_first:
        again = f"--steps {2 * first_step} or another folder"
        print(f"already at step {first_step} of {flags.steps}: nothing to do; {again}")
    if is_first:
        loss, accuracy = model.evaluate(*make_digits(seed=2), batch_size=256, verbose=0)
        print(f"new pictures: loss {loss:.4f}, {accuracy:.1%} right; saved to {saved}")


if __name__ == "__main__":
    main()
