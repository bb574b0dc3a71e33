"""Size files: the shipped ones are sound, and mistakes in a user's file are reported."""

from __future__ import annotations

import pytest
from settings import read_settings

from tests.examples.conftest import EXAMPLE
from tests.refusing import refuses

CONFIGS = EXAMPLE.parent.parent / "configs"
SHIPPED = sorted(path.name for path in CONFIGS.glob("bert_*.toml"))


def test_the_three_sizes_are_there():
    assert SHIPPED == ["bert_base.toml", "bert_small.toml", "bert_tiny.toml"]


@pytest.mark.parametrize("name", SHIPPED)
def test_shipped_files_are_read_from_anywhere(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    settings = read_settings(f"configs/{name}")
    assert settings.model.hidden_size % settings.model.num_heads == 0
    assert settings.training.num_train_steps > 0


@pytest.fixture
def changed(tmp_path):
    """Writes bert_tiny.toml with one piece of text replaced, and returns its path."""
    text = (CONFIGS / "bert_tiny.toml").read_text()

    def change(old, new):
        assert old in text
        path = tmp_path / "mine.toml"
        path.write_text(text.replace(old, new))
        return str(path)

    return change


@refuses(
    ValueError,
    ("num_heads", "num_head", "'num_head' is not a key of [model]. Did you mean 'num_heads'"),
    ("[training]", "[train]", "'train' is not a table. Did you mean 'training'"),
    ("ffn_size = 512", "", "lacks ffn_size"),
    ("num_layers = 2", 'num_layers = "2"', "num_layers expected int; got '2'"),
    ("num_heads = 2", "num_heads = 3", "num_heads=3; got hidden_size=128"),
    ("max_seq_length = 64", "max_seq_length = 65", "max_positions=64; got 65"),
    ("warmup_share = 0.1", "warmup_share = 1.0", ["warmup_share", "got 1.0"]),
)
def test_mistakes_are_told(old, new, changed):
    read_settings(changed(old, new))


def test_whole_numbers_are_fine_where_fractions_are(changed):
    assert read_settings(changed("learning_rate = 0.02", "learning_rate = 1")).training.learning_rate == 1


def test_missing_file_lists_those_there_are():
    with pytest.raises(ValueError, match="'nothing.toml'.*configs/bert_tiny.toml"):
        read_settings("nothing.toml")
