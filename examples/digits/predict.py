"""Uses a trained network: evaluates it, lets it read pictures, exports it, and uses the export without its code.

python examples/digits/train_estimator.py     # first
python examples/digits/predict.py
"""

from __future__ import annotations

import argparse
import os

import numpy as np
from digits import load
from train_estimator import held_out_input_fn, make_estimator

from npu_bridge.npu_init import tf


def serving_input_fn():
    """Returns a receiver for any number of pictures, under the name that the network has for pictures."""
    pictures = tf.placeholder(tf.float32, [None, 8, 8, 1], name="pictures")
    return tf.estimator.export.ServingInputReceiver({"pictures": pictures}, {"pictures": pictures})


def as_text(picture):
    """Draws a picture as eight lines of characters: dense ones for dark pixels."""
    shades = np.array(list("  .:-=+*#%@"))
    return ["".join(shades[np.repeat(row, 2)]).rstrip() for row in (picture[..., 0] * 10).astype(int)]


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model_dir", default="out/digits", help="the output folder of train_estimator.py")
    parser.add_argument("--pictures", type=int, default=5, help="how many to show")
    flags = parser.parse_args()
    tf.enable_eager_execution()  # for the export, which is used as in TensorFlow 2
    if tf.train.latest_checkpoint(flags.model_dir) is None:
        parser.error(f"{flags.model_dir} holds no checkpoint. Run train_estimator.py first, or name another folder.")
    estimator = make_estimator(flags.model_dir)

    result = estimator.evaluate(held_out_input_fn)
    print(f"step {result['global_step']}: {result['accuracy']:.1%} of the held-out pictures are read right")

    pictures, digits = load()[1]
    answers = list(estimator.predict(held_out_input_fn))
    for picture, digit, answer in list(zip(pictures, digits, answers))[: flags.pictures]:
        read, sure = answer["digit"], answer["probabilities"].max()
        print(*as_text(picture), f"read as {read}, {sure:.1%} sure; it is {digit}\n", sep="\n")

    exported = estimator.export_saved_model(os.path.join(flags.model_dir, "export"), serving_input_fn).decode()
    served = tf.compat.v2.saved_model.load(exported).signatures["serving_default"](pictures=tf.constant(pictures))
    same = np.mean(served["digit"].numpy() == [answer["digit"] for answer in answers])
    print(f"exported to {exported}: reads {same:.0%} of the pictures alike")


if __name__ == "__main__":
    main()
