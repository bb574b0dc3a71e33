"""Chooses the tokens that the model has to guess: the masked-language-model task, and its batches.

Fifteen in a hundred tokens of a row become targets. Of these, eight in ten are replaced by `[MASK]`, one in
ten by a random token, and one in ten stays unchanged (Devlin et al. 2018, section 3.1). The changes to a
row depend only on (seed, epoch, row), never on its batch, rank or process.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np
from corpus import Rows
from vocabulary import MASK_ID, SPECIAL_PIECES

MASKED_SHARE = 0.15
_REPLACED_BY_MASK = 0.8
_REPLACED_BY_RANDOM = 0.1


class MaskedRow(NamedTuple):
    """One row after masking: changed token ids, and the targets padded to a fixed count with weight 0."""

    token_ids: np.ndarray
    positions: np.ndarray
    labels: np.ndarray
    weights: np.ndarray


def max_predictions(max_seq_length: int) -> int:
    """Returns the largest number of targets in a row: 15 % of its length, rounded up."""
    return math.ceil(MASKED_SHARE * max_seq_length)


def mask_row(token_ids: np.ndarray, vocabulary_size: int, rng: np.random.Generator) -> MaskedRow:
    """Chooses and hides the targets of one row. Special tokens and padding are never targets."""
    slots = max_predictions(len(token_ids))
    candidates = np.flatnonzero(token_ids >= len(SPECIAL_PIECES))
    count = min(slots, max(1, round(MASKED_SHARE * len(candidates))), len(candidates))
    chosen = np.sort(rng.permutation(candidates)[:count])
    fate = rng.random(count)
    random_tokens = rng.integers(len(SPECIAL_PIECES), vocabulary_size, count)

    changed = token_ids.copy()
    changed[chosen] = np.where(
        fate < _REPLACED_BY_MASK,
        MASK_ID,
        np.where(fate < _REPLACED_BY_MASK + _REPLACED_BY_RANDOM, random_tokens, token_ids[chosen]),
    )
    positions = np.zeros(slots, np.int32)
    labels = np.zeros(slots, np.int32)
    weights = np.zeros(slots, np.float32)
    positions[:count] = chosen
    labels[:count] = token_ids[chosen]
    weights[:count] = 1.0
    return MaskedRow(changed, positions, labels, weights)


class MaskedBatches:
    """Batches for any list of positions in the endless, shuffled, masked stream over some rows.

    Position `p` is the `p % len(rows)`-th row of epoch `p // len(rows)`; each epoch has its own order and
    its own masks. A resumed run asks for the positions that it had not reached yet.

    Args:
      rows: the rows to read.
      vocabulary_size: random replacement tokens are below this id.
      seed: determines the whole stream.
    """

    def __init__(self, rows: Rows, vocabulary_size: int, seed: int):
        if not len(rows):
            raise ValueError("MaskedBatches: there is no row to read.")
        self._rows = rows
        self._vocabulary_size = vocabulary_size
        self._seed = seed
        self._order = (-1, np.zeros(0, np.int64))

    def batch(self, positions: np.ndarray) -> dict[str, np.ndarray]:
        """Returns the masked rows at these stream positions, stacked; keys are those of `feature_shapes`."""
        places = [self._place(int(position)) for position in positions]
        masked = [
            mask_row(
                self._rows.token_ids[row],
                self._vocabulary_size,
                np.random.default_rng([self._seed, 1, epoch, row]),
            )
            for epoch, row in places
        ]
        return {
            "token_ids": np.stack([one.token_ids for one in masked]),
            "segment_ids": self._rows.segment_ids[[row for _, row in places]],
            "target_positions": np.stack([one.positions for one in masked]),
            "target_ids": np.stack([one.labels for one in masked]),
            "target_weights": np.stack([one.weights for one in masked]),
        }

    def _place(self, position: int):
        epoch, offset = divmod(position, len(self._rows))
        known, order = self._order
        if known != epoch:
            order = np.random.default_rng([self._seed, 0, epoch]).permutation(len(self._rows))
            self._order = (epoch, order)
        return epoch, int(order[offset])


def feature_shapes(max_seq_length: int) -> dict[str, tuple]:
    """Returns name, numpy dtype and row shape of every feature of a batch, in the order of `MaskedBatches.batch`."""
    slots = max_predictions(max_seq_length)
    return {
        "token_ids": (np.int32, max_seq_length),
        "segment_ids": (np.int32, max_seq_length),
        "target_positions": (np.int32, slots),
        "target_ids": (np.int32, slots),
        "target_weights": (np.float32, slots),
    }
