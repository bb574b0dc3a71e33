"""Loads real handwritten digits: the 1797 pictures of 8 x 8 pixels that ship with scikit-learn."""

from __future__ import annotations

import numpy as np
from sklearn.datasets import load_digits

from npu_bridge.npu_init import get_rank_id, get_rank_size, tf

HELD_OUT = 360


def load() -> tuple[tuple[np.ndarray, np.ndarray], tuple[np.ndarray, np.ndarray]]:
    """Returns two pairs, for training and held out: pictures (float32, 8 x 8 x 1, from 0 to 1) and digits (int32)."""
    pictures, digits = load_digits(return_X_y=True)
    order = np.random.RandomState(0).permutation(len(digits))
    pictures = (pictures[order] / 16).astype(np.float32).reshape(-1, 8, 8, 1)
    digits = digits[order].astype(np.int32)
    return (pictures[HELD_OUT:], digits[HELD_OUT:]), (pictures[:HELD_OUT], digits[:HELD_OUT])


def training_batches(batch_size: int, done: int = 0) -> tf.data.Dataset:
    """Returns this rank's share of an endless stream of batches, from batch number `done` on.

    Every rank shuffles alike and takes its own part of each batch. So any number of ranks trains on the same batches,
    and a training that resumes after `done` batches sees the same batches as an uninterrupted training.

    Args:
      batch_size: pictures of all ranks together.
      done: number of batches to skip.
    Raises:
      ValueError: the ranks cannot share a batch evenly.
    """
    pictures, digits = load()[0]
    ranks, rank = get_rank_size(), get_rank_id()
    if batch_size % ranks:
        raise ValueError(f"--batch_size: expected a multiple of the {ranks} ranks; got {batch_size}.")
    stream = tf.data.Dataset.from_tensor_slices((pictures, digits)).shuffle(len(digits), seed=1).repeat()
    own = stream.skip(done * batch_size).shard(ranks, rank)
    return own.batch(batch_size // ranks, drop_remainder=True).prefetch(2)
