"""Reading text and packing it into rows."""

from __future__ import annotations

import numpy as np
import pytest
from corpus import make_rows, read_documents, split_held_out, split_sentences
from vocabulary import CLS_ID, PAD_ID, SEP_ID, build_vocabulary

from tests.refusing import refuses


@pytest.fixture(scope="module")
def documents():
    return read_documents()


@pytest.fixture(scope="module")
def vocabulary(documents):
    return build_vocabulary(documents, 1024)


def test_default_corpus_is_real_english_text(documents):
    assert sum(len(text) for text in documents) > 300_000
    assert any("the value of the" in text for text in documents)


def test_folders_are_read_in_a_fixed_order(tmp_path):
    for name in ("b.txt", "a.md", "c.bin"):
        (tmp_path / name).write_text(name)
    assert read_documents([str(tmp_path)]) == ["a.md", "b.txt"]
    assert read_documents([str(tmp_path / "c.bin")]) == ["c.bin"]


def test_sentences():
    assert split_sentences("Title\n*****\n\nOne is here. Two\nis here!\n\nThree") == [
        "Title",
        "One is here.",
        "Two is here!",
        "Three",
    ]


def test_rows_hold_the_whole_text_in_order(documents, vocabulary):
    text = documents[0]
    rows = make_rows([text], vocabulary, 64)
    ids = rows.token_ids[~np.isin(rows.token_ids, [PAD_ID, CLS_ID, SEP_ID])]
    expected = [index for sentence in split_sentences(text) for index in vocabulary.encode(sentence)]
    assert expected[: len(ids)] == ids.tolist()
    assert len(expected) - len(ids) < 8  # an end too short for a row of its own


def test_rows_have_two_segments_around_one_middle_mark(documents, vocabulary):
    rows = make_rows(documents, vocabulary, 64)
    assert rows.token_ids.shape == rows.segment_ids.shape == (len(rows), 64)
    assert (rows.token_ids[:, 0] == CLS_ID).all()
    assert ((rows.token_ids == SEP_ID).sum(axis=1) == 2).all()
    for tokens, segments in zip(rows.token_ids[:50], rows.segment_ids[:50]):
        first, last = np.flatnonzero(tokens == SEP_ID)
        assert (segments == [0] * (first + 1) + [1] * (last - first) + [0] * (63 - last)).all()


@refuses(
    ValueError,
    (lambda folder, _: read_documents([str(folder / "nothing")]), "does not exist"),
    (lambda folder, _: read_documents([str(folder)]), "holds no file"),
    (lambda _, vocabulary: make_rows(["a b"], vocabulary, 64), "too short"),
    (lambda _, vocabulary: make_rows(["a b"], vocabulary, 8), "got 8"),
)
def test_missing_paths_and_too_little_text_are_refused(read, tmp_path, vocabulary):
    read(tmp_path, vocabulary)


def test_held_out_rows_are_not_trained_on(documents, vocabulary):
    rows = make_rows(documents, vocabulary, 32)
    training, held_out = split_held_out(rows, every=20)
    assert len(training) + len(held_out) == len(rows)
    assert len(held_out) == -(-len(rows) // 20)
    assert (held_out.token_ids == rows.token_ids[::20]).all()
    few = make_rows(documents[:1], vocabulary, 64)
    training, held_out = split_held_out(few, every=len(few) + 1)
    assert len(training) == len(few) and len(held_out) == 0
