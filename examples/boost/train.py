"""Trains on handwritten digits plainly, and with `boost.apply`: freezing, accumulation and centralisation.

    python examples/boost/train.py
    python examples/boost/train.py --epochs 2 --out out/boost

Both trainings begin with the same weights and see the same batches. The output folder then has `curves.svg`: the loss
over the batches, and below it the share of the layers that each update trained.
"""

from __future__ import annotations

import argparse
import os
import pathlib
from typing import NamedTuple

import numpy as np
from sklearn.datasets import load_digits

from npu_bridge import boost
from npu_bridge.npu_init import npu_keras_optimizer

# isort: split
import tensorflow as tf  # after npu_bridge, which hides TensorFlow's notes about its own build

BATCH, HELD_OUT, GROUPS = 32, 357, 4


class Run(NamedTuple):
    """The results of a training.

    Attributes:
      losses: the loss of each batch.
      trained: for each update, (number of batches so far, share of the trained values that the update changed).
      accuracy: on the held-out pictures, after the last batch.
    """

    losses: list
    trained: list
    accuracy: float


def main(arguments=None):
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--epochs", type=int, default=6)
    parser.add_argument("--rate", type=float, default=0.02, help="the learning rate of plain training")
    parser.add_argument("--out", default="out/boost", help="folder of the picture")
    flags = parser.parse_args(arguments)
    config = boost.BoostConfig.from_toml(pathlib.Path(__file__).with_name("boost.toml"))
    # One update for two batches, with their mean, so the rate is doubled.
    plain = train(npu_keras_optimizer(tf.keras.optimizers.legacy.SGD(flags.rate, 0.9)), flags.epochs)
    rate = flags.rate * config["grad_accumulation"]["grad_accumulation_step"]
    boosted = train(boost.apply(tf.keras.optimizers.legacy.SGD(rate, 0.9), config=config), flags.epochs)
    for name, run in (("plain", plain), ("boosted", boosted)):
        work = sum(share for _, share in run.trained) / len(run.losses)
        print(f"{name}: loss {np.mean(run.losses[-20:]):.3f}, accuracy {run.accuracy:.1%}, updates {work:.2f} a batch")
    from picture import draw

    os.makedirs(flags.out, exist_ok=True)
    print(f"wrote {draw(plain, boosted, os.path.join(flags.out, 'curves.svg'))}")
    return plain, boosted


def train(optimizer, epochs):
    """Trains the network of this example from its initial weights."""
    pictures, digits = load_digits(return_X_y=True)
    order = np.random.default_rng(0).permutation(len(digits))
    pictures = (pictures[order] / 16).astype(np.float32).reshape(-1, 8, 8, 1)
    digits = digits[order]
    model = network()
    model.compile(optimizer, loss="sparse_categorical_crossentropy", metrics=["accuracy"])
    watch = Watch(optimizer)
    model.fit(
        *(array[HELD_OUT:] for array in (pictures, digits)), BATCH, epochs, shuffle=False, verbose=0, callbacks=[watch]
    )
    accuracy = model.evaluate(pictures[:HELD_OUT], digits[:HELD_OUT], verbose=0)[1]
    return Run(watch.losses, watch.trained, accuracy)


def network():
    """Builds a small residual network: pictures [n, 8, 8, 1] in, probabilities [n, 10] out."""
    tf.keras.utils.set_random_seed(1)
    layers = tf.keras.layers
    image = tf.keras.Input([8, 8, 1])
    x = layers.ReLU()(layers.Conv2D(16, 3, padding="same", name="stem")(image))
    for number in range(3):
        y = layers.ReLU()(layers.Conv2D(16, 3, padding="same", name=f"block_{number}_a")(x))
        x = layers.ReLU()(layers.Add()([x, layers.Conv2D(16, 3, padding="same", name=f"block_{number}_b")(y)]))
    x = layers.MaxPooling2D(2)(x)
    return tf.keras.Model(image, layers.Dense(10, activation="softmax", name="digits")(layers.Flatten()(x)))


class Watch(tf.keras.callbacks.Callback):
    """Notes the loss of each batch, and the changes of each update."""

    def __init__(self, optimizer):
        super().__init__()
        self.losses, self.trained = [], []
        self._optimizer, self._updates, self._seen = optimizer, 0, 0.0

    def on_train_begin(self, logs=None):
        self._values = [variable.numpy() for variable in self.model.trainable_variables]

    def on_epoch_begin(self, epoch, logs=None):
        self._seen, self._of_epoch = 0.0, 0

    def on_train_batch_end(self, batch, logs=None):
        # Keras gives the mean over the epoch so far.
        self._of_epoch += 1
        self.losses.append(logs["loss"] * self._of_epoch - self._seen)
        self._seen = logs["loss"] * self._of_epoch
        updates = int(self._optimizer.iterations)
        if updates == self._updates:
            return
        self._updates = updates
        values = [variable.numpy() for variable in self.model.trainable_variables]
        is_changed = [not np.array_equal(old, new) for old, new in zip(self._values, values)]
        sizes = [value.size for value in values]
        share = sum(size for size, is_new in zip(sizes, is_changed) if is_new) / sum(sizes)
        self.trained.append((len(self.losses), share))
        self._values = values


if __name__ == "__main__":
    main()
