"""The picture of trainings with all values on the wire and with some of them; the trainings are those of the BERT."""

from __future__ import annotations

import pathlib

import pytest

from tests.loose_code import module_at


@pytest.fixture(scope="module")
def loss_curves():
    return module_at("examples/stages/loss_curves.py")


def test_a_picture_has_every_training_and_says_how_they_end(loss_curves, tmp_path):
    losses = {kind: [[6.0 + place] * 40, [6.5 + place] * 40] for place, kind in enumerate(loss_curves.KINDS)}
    loss_curves.draw(losses, tmp_path / "curves.svg")
    said = (tmp_path / "curves.svg").read_text()  # letters are drawn, and a comment says which
    assert "small BERT, 2 ranks, 2 seeds" in said
    assert "all values: 6.25, largest 1 %, error feedback: 7.25" in said
    assert loss_curves.TRAIN.exists() and all(
        pathlib.Path(words[1]).exists() for words in loss_curves.KINDS.values() if words
    )
