"""Sub-word vocabulary: what it learns, and that cutting and joining text are inverse."""

from __future__ import annotations

import pytest
from corpus import read_documents
from vocabulary import (
    SPECIAL_PIECES,
    UNKNOWN_ID,
    WORD_START,
    Vocabulary,
    build_vocabulary,
    load_or_build,
    split_words,
)


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


def test_words_know_whether_a_space_came_before():
    assert split_words("f(x) + 12_a") == [
        WORD_START + "f",
        "(",
        "x",
        ")",
        WORD_START + "+",
        WORD_START + "1",
        "2",
        "_",
        "a",
    ]


def test_size_is_reached_on_the_default_corpus(vocabulary):
    assert len(vocabulary) == 2048
    assert len(set(vocabulary.pieces)) == 2048


def test_round_trip_up_to_white_space(documents, vocabulary):
    for text in documents[:10]:
        assert vocabulary.decode(vocabulary.encode(text)) == " ".join(text.lower().split())


def test_common_words_are_one_piece(vocabulary):
    assert len(vocabulary.encode("the class is an object")) == 5


def test_unknown_characters_become_the_unknown_piece(vocabulary):
    assert vocabulary.encode("\u4e2d")[-1] == UNKNOWN_ID


def test_same_text_gives_the_same_pieces(documents, vocabulary):
    assert build_vocabulary(documents, 2048).pieces == vocabulary.pieces


def test_small_corpus_gives_fewer_pieces():
    assert len(build_vocabulary(["one two"], 1000)) < 1000


def test_case_can_be_kept():
    learned = build_vocabulary(["The The the"], 30, lower_case=False)
    assert learned.decode(learned.encode("The the")) == "The the"


def test_file_round_trip(tmp_path, vocabulary):
    path = str(tmp_path / "vocabulary.txt")
    vocabulary.save(path)
    loaded = Vocabulary.load(path)
    assert loaded.pieces == vocabulary.pieces and loaded.lower_case
    assert [entry.name for entry in tmp_path.iterdir()] == ["vocabulary.txt"]


def test_only_the_writing_rank_writes_and_all_agree(tmp_path, documents):
    path = tmp_path / "vocabulary.txt"
    silent = load_or_build(str(path), documents[:5], 300, True, write=False)
    assert not path.exists()
    writer = load_or_build(str(path), documents[:5], 300, True, write=True)
    reader = load_or_build(str(path), documents[5:], 300, True, write=False)
    assert silent.pieces == writer.pieces == reader.pieces


def test_vocabulary_of_another_configuration_is_refused(tmp_path, documents):
    path = str(tmp_path / "vocabulary.txt")
    load_or_build(path, documents[:5], 300, True, write=True)
    with pytest.raises(ValueError, match="got 300 pieces.*--output_dir"):
        load_or_build(path, documents[:5], 200, True, write=True)


@pytest.mark.parametrize(
    ("pieces", "message"),
    [(["a", "b"], "begins with"), ([*SPECIAL_PIECES, "a", "a"], "occur twice")],
)
def test_malformed_lists_are_refused(pieces, message):
    with pytest.raises(ValueError, match=message):
        Vocabulary(pieces)


def test_empty_corpus_and_tiny_size_are_refused():
    with pytest.raises(ValueError, match="no words"):
        build_vocabulary([" "], 100)
    with pytest.raises(ValueError, match="got 5"):
        build_vocabulary(["text"], 5)
