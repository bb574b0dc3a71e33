"""The masked-language-model task: rates, bounds, and what the masks depend on."""

from __future__ import annotations

import numpy as np
import pytest
from corpus import Rows
from masking import MaskedBatches, feature_shapes, mask_row, max_predictions
from vocabulary import CLS_ID, MASK_ID, PAD_ID, SEP_ID, SPECIAL_PIECES

VOCABULARY_SIZE = 1000
LENGTH = 64


@pytest.fixture(scope="module")
def rows():
    rng = np.random.default_rng(7)
    tokens = rng.integers(len(SPECIAL_PIECES), VOCABULARY_SIZE, (300, LENGTH), dtype=np.int32)
    tokens[:, 0], tokens[:, 30], tokens[:, 55], tokens[:, 56:] = CLS_ID, SEP_ID, SEP_ID, PAD_ID
    segments = np.zeros_like(tokens)
    segments[:, 31:56] = 1
    return Rows(tokens, segments)


@pytest.fixture
def batches(rows):
    return MaskedBatches(rows, VOCABULARY_SIZE, seed=3)


def test_fates_of_the_targets(rows, batches):
    batch = batches.batch(np.arange(3000))
    is_target = batch["target_weights"] == 1
    labels = batch["target_ids"][is_target]
    shown = np.take_along_axis(batch["token_ids"], batch["target_positions"], 1)[is_target]
    maskable = (rows.token_ids >= len(SPECIAL_PIECES)).sum() * 10
    assert is_target.sum() / maskable == pytest.approx(0.15, abs=0.01)
    assert (shown == MASK_ID).mean() == pytest.approx(0.8, abs=0.02)
    # One random replacement in a thousand hits the token itself.
    assert (shown == labels).mean() == pytest.approx(0.1, abs=0.02)


def test_special_pieces_are_never_targets_and_never_drawn(batches):
    batch = batches.batch(np.arange(300))
    is_target = batch["target_weights"] == 1
    assert (batch["target_ids"][is_target] >= len(SPECIAL_PIECES)).all()
    shown = np.take_along_axis(batch["token_ids"], batch["target_positions"], 1)[is_target]
    assert ((shown >= len(SPECIAL_PIECES)) | (shown == MASK_ID)).all()


@pytest.mark.parametrize("words, targets", [([10, 11, 12], 1), ([], 0)])
def test_padding_targets_have_no_weight(words, targets):
    tokens = np.array([CLS_ID, *words, SEP_ID, *[PAD_ID] * (62 - len(words))], np.int32)
    row = mask_row(tokens, VOCABULARY_SIZE, np.random.default_rng(1))
    assert len(row.weights) == max_predictions(LENGTH) == 10
    assert row.weights.tolist() == [1.0] * targets + [0.0] * (10 - targets)


def test_a_row_is_masked_alike_in_any_batch(rows, batches):
    together = batches.batch(np.arange(8))
    other_process = MaskedBatches(rows, VOCABULARY_SIZE, seed=3)
    for position in (5, 2):
        alone = other_process.batch(np.array([position]))
        for name, array in alone.items():
            np.testing.assert_array_equal(array[0], together[name][position], err_msg=name)


def test_epochs_and_seeds_differ_in_order_and_masks_but_hold_the_same_rows(rows, batches):
    first, second = batches.batch(np.arange(300)), batches.batch(np.arange(300, 600))
    other_seed = MaskedBatches(rows, VOCABULARY_SIZE, seed=4).batch(np.arange(300))
    assert (first["token_ids"] != second["token_ids"]).any() and (first["token_ids"] != other_seed["token_ids"]).any()

    def restored(batch):
        tokens = batch["token_ids"].copy()
        for row, positions, labels, weights in zip(
            tokens, batch["target_positions"], batch["target_ids"], batch["target_weights"]
        ):
            row[positions[weights == 1]] = labels[weights == 1]
        return sorted(map(tuple, tokens))

    assert restored(first) == restored(second) == sorted(map(tuple, rows.token_ids))


def test_batches_have_the_announced_shapes(batches):
    batch = batches.batch(np.arange(4))
    assert {name: (array.dtype.type, array.shape) for name, array in batch.items()} == {
        name: (kind, (4, width)) for name, (kind, width) in feature_shapes(LENGTH).items()
    }


def test_no_rows_are_refused(rows):
    with pytest.raises(ValueError, match="no row"):
        MaskedBatches(Rows(rows.token_ids[:0], rows.segment_ids[:0]), VOCABULARY_SIZE, seed=1)
