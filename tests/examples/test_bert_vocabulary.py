"""Sub-word vocabulary: what it learns, and that cutting and joining text are inverse."""

from __future__ import annotations

import pytest
from corpus import read_documents
from vocabulary import SPECIAL_PIECES, UNKNOWN_ID, WORD_START, Vocabulary, build_vocabulary, load_or_build

from tests.refusing import refuses


@pytest.fixture(scope="module")
def documents():
    return read_documents()


@pytest.fixture(scope="module")
def vocabulary(documents):
    return build_vocabulary(documents, 2048)


def test_most_frequent_pair_is_joined_first():
    learned = build_vocabulary(["ab ab ab ab cd cd"], 12)
    # First the four most frequent characters; then pairs, of which (a, b) comes before the equally frequent
    # (start, a) in alphabetical order.
    assert learned.pieces[len(SPECIAL_PIECES) :] == [WORD_START, "a", "b", "c", "ab", WORD_START + "ab", "cd"]


def test_size_is_reached_on_the_default_corpus(vocabulary):
    assert len(vocabulary) == 2048
    assert len(set(vocabulary.pieces)) == 2048


def test_round_trip_up_to_white_space(documents, vocabulary):
    for text in documents[:10]:
        assert vocabulary.decode(vocabulary.encode(text)) == " ".join(text.lower().split())


def test_unknown_characters_become_the_unknown_piece(vocabulary):
    assert vocabulary.encode("\u4e2d")[-1] == UNKNOWN_ID


def test_case_can_be_kept_and_a_small_corpus_gives_fewer_pieces():
    learned = build_vocabulary(["The The the"], 30, lower_case=False)
    assert learned.decode(learned.encode("The the")) == "The the" and len(learned) < 30


def test_only_the_writing_rank_writes_and_all_agree(tmp_path, documents):
    path = tmp_path / "vocabulary.txt"
    silent = load_or_build(str(path), documents[:5], 300, True, write=False)
    assert not path.exists()
    writer = load_or_build(str(path), documents[:5], 300, True, write=True)
    reader = load_or_build(str(path), documents[5:], 300, True, write=False)
    assert silent.pieces == writer.pieces == reader.pieces and reader.lower_case
    assert [entry.name for entry in tmp_path.iterdir()] == ["vocabulary.txt"]


def test_vocabulary_of_another_configuration_is_refused(tmp_path, documents):
    path = str(tmp_path / "vocabulary.txt")
    load_or_build(path, documents[:5], 300, True, write=True)
    with pytest.raises(ValueError, match="got 300 pieces.*--output_dir"):
        load_or_build(path, documents[:5], 200, True, write=True)


@refuses(
    ValueError,
    (lambda: Vocabulary(["a", "b"]), "begins with"),
    (lambda: Vocabulary([*SPECIAL_PIECES, "a", "a"]), "occur twice"),
    (lambda: build_vocabulary([" "], 100), "no words"),
    (lambda: build_vocabulary(["text"], 5), "got 5"),
)
def test_what_makes_no_vocabulary_is_refused(make):
    make()
