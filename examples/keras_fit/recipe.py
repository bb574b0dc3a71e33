"""Shows a complete training on one or several ranks, in Keras 2 (TensorFlow 2.15) and Keras 3 (from 2.16 on).

python examples/keras_fit/recipe.py                  # one process
npu-run -np 2 examples/keras_fit/recipe.py           # two ranks that share every batch

A convolutional network in mixed precision, with a dynamic loss scale, accumulated batches, validation, early stopping
and the best model kept. A run that was interrupted resumes at its last epoch, with its patience.
"""

from __future__ import annotations

import argparse
import pathlib

from npu_bridge.amp import DynamicLossScaleManager
from npu_bridge.npu_init import get_rank_id, get_rank_size, npu_callbacks_append, npu_keras_optimizer
from npu_bridge.reporting import ReportCallback
from npu_bridge.session import ResumeCallback
from npu_bridge.stages import Accumulate

# isort: split
import keras  # after npu_bridge, which prepares TensorFlow
import tensorflow as tf
from train import make_digits

BATCH, ACCUMULATED = 64, 2  # rows of all ranks in a batch, and batches in an update
HELD_OUT = 512


def read_flags():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--epochs", type=int, default=12, help="epochs at most")
    parser.add_argument("--patience", type=int, default=3, help="epochs without a better validation loss")
    parser.add_argument("--output_dir", type=pathlib.Path, default="out/keras_recipe")
    return parser.parse_args()


def make_data():
    """Returns this rank's training data, the number of its batches, and the validation data, equal on all ranks."""
    pictures, digits = make_digits()
    rows = len(pictures) - HELD_OUT
    whole = tf.data.Dataset.from_tensor_slices((pictures[:rows], digits[:rows])).shuffle(rows, seed=1)
    own = whole.shard(get_rank_size(), get_rank_id()).batch(BATCH // get_rank_size(), drop_remainder=True)
    held_out = tf.data.Dataset.from_tensor_slices((pictures[rows:], digits[rows:])).batch(HELD_OUT)
    return own, rows // BATCH, held_out


def make_model():
    keras.mixed_precision.set_global_policy("mixed_float16")
    keras.utils.set_random_seed(1)
    model = keras.Sequential(
        [
            keras.layers.Input([14, 12, 1]),
            keras.layers.Conv2D(8, 3, activation="relu"),
            keras.layers.MaxPooling2D(),
            keras.layers.Flatten(),
            keras.layers.Dense(64, activation="relu"),
            keras.layers.Dense(10, dtype="float32"),  # logits and loss in float32
        ]
    )
    manager = DynamicLossScaleManager.keras()
    optimizer = npu_keras_optimizer(keras.optimizers.Adam(5e-3), manager, stages=[Accumulate(ACCUMULATED)])
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(optimizer, loss, metrics=["accuracy"], jit_compile=False)
    return model


def main():
    flags = read_flags()
    is_first, best = get_rank_id() == 0, flags.output_dir / "best.keras"
    flags.output_dir.mkdir(parents=True, exist_ok=True)
    data, batches, held_out = make_data()
    model = make_model()
    resume = ResumeCallback(flags.output_dir / "model.keras")  # saves at the end of each epoch
    done = resume.restore(model)  # batches, not updates; an epoch that was interrupted is trained again
    if is_first and done:
        print(f"resuming at epoch {done // batches + 1}, after {done} batches")

    stop = keras.callbacks.EarlyStopping(patience=flags.patience, restore_best_weights=True)
    callbacks = [stop, resume, ReportCallback(flags.output_dir)]  # on every rank
    if is_first:
        callbacks.append(keras.callbacks.ModelCheckpoint(str(best), save_best_only=True))
    model.fit(
        data,
        epochs=flags.epochs,
        initial_epoch=done // batches,
        validation_data=held_out,
        callbacks=npu_callbacks_append(callbacks),
        verbose=2 if is_first else 0,
    )
    if is_first:
        optimizer = model.optimizer
        print(
            f"updates {int(optimizer.iterations)}  skipped {int(optimizer.skipped_steps)}  "
            f"loss scale {float(optimizer.loss_scale):g}  epochs without a better one {stop.wait}"
        )
        _, accuracy = keras.models.load_model(best).evaluate(held_out, verbose=0)
        print(f"best model: {accuracy:.1%} right; {best}")


if __name__ == "__main__":
    main()
