"""Makes rows of token ids from text files.

A row is `[CLS] first part [SEP] second part [SEP]`, cut where a sentence ends near the middle. Rows never
share text, so holding out every n-th row gives a set that the model has not read.
"""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from vocabulary import CLS_ID, PAD_ID, SEP_ID, Vocabulary

_TEXT_ENDINGS = (".txt", ".md", ".rst", ".text")
_HEADING_RULE = re.compile(r"^\s*([^\w\s])\1{2,}\s*$", re.MULTILINE)
_PARAGRAPH = re.compile(r"\n\s*\n")
_SENTENCE_END = re.compile(r"(?<=[.!?:])\s+")

# A row with fewer tokens has too little context to guess from (ours).
_MIN_TOKENS = 8


class Rows(NamedTuple):
    """Fixed-length rows: `token_ids` and `segment_ids`, both int32 of shape [rows, max_seq_length]."""

    token_ids: np.ndarray
    segment_ids: np.ndarray

    def __len__(self) -> int:
        return len(self.token_ids)


def read_documents(paths: Sequence[str] = ()) -> list[str]:
    """Reads text documents, one per file, in a fixed order.

    Args:
      paths: files, or folders that are searched for .txt, .md, .rst and .text files. Empty: the English
        reference texts that come with Python itself, about half a megabyte.
    Raises:
      ValueError: a path does not exist, or a folder holds no text file.
    """
    if not paths:
        from pydoc_data import topics

        return [topics.topics[name] for name in sorted(topics.topics)]
    documents = []
    for path in paths:
        for name in _files_under(path):
            with open(name, encoding="utf-8", errors="replace") as text:
                documents.append(text.read())
    return documents


def _files_under(path: str) -> list[str]:
    if os.path.isfile(path):
        return [path]
    if not os.path.isdir(path):
        raise ValueError(f"--corpus: expected files or folders; got {path!r}, which does not exist.")
    found = []
    for folder, _, names in os.walk(path):
        found += [os.path.join(folder, name) for name in names if name.endswith(_TEXT_ENDINGS)]
    if not found:
        raise ValueError(f"--corpus: the folder {path!r} holds no file that ends in {', '.join(_TEXT_ENDINGS)}.")
    return sorted(found)


def split_sentences(document: str) -> list[str]:
    """Cuts a document into sentences; drops rules under headings, and always ends a sentence at a paragraph."""
    paragraphs = _PARAGRAPH.split(_HEADING_RULE.sub("\n", document))
    sentences = []
    for paragraph in paragraphs:
        sentences += [sentence for sentence in _SENTENCE_END.split(" ".join(paragraph.split())) if sentence]
    return sentences


def make_rows(documents: Sequence[str], vocabulary: Vocabulary, max_seq_length: int) -> Rows:
    """Encodes documents and packs them into rows of `max_seq_length` tokens.

    Only the last row of a document is padded. A document too short for one row makes no row.

    Raises:
      ValueError: no document makes a row, or rows are too short for any token.
    """
    if max_seq_length < _MIN_TOKENS + 3:
        raise ValueError(f"--max_seq_length: expected at least {_MIN_TOKENS + 3} tokens; got {max_seq_length}.")
    tokens, segments = [], []
    for document in documents:
        ids: list[int] = []
        ends = [0]
        for sentence in split_sentences(document):
            ids += vocabulary.encode(sentence)
            ends.append(len(ids))
        sentence_ends = np.array(ends)
        room = max_seq_length - 3
        for start in range(0, len(ids), room):
            part = ids[start : start + room]
            if len(part) >= _MIN_TOKENS:
                row = _pack(part, sentence_ends - start, max_seq_length)
                tokens.append(row[0])
                segments.append(row[1])
    if not tokens:
        raise ValueError(f"--corpus: the text is too short; no document has {_MIN_TOKENS} tokens.")
    return Rows(np.array(tokens, np.int32), np.array(segments, np.int32))


def _pack(ids: list[int], sentence_ends: np.ndarray, length: int) -> tuple[list[int], list[int]]:
    middle = len(ids) // 2
    inside = sentence_ends[(sentence_ends > 0) & (sentence_ends < len(ids))]
    cut = int(inside[np.argmin(np.abs(inside - middle))]) if inside.size else middle
    first, second = ids[:cut], ids[cut:]
    row = [CLS_ID, *first, SEP_ID, *second, SEP_ID]
    segments = [0] * (len(first) + 2) + [1] * (len(second) + 1)
    padding = length - len(row)
    return row + [PAD_ID] * padding, segments + [0] * padding


def split_held_out(rows: Rows, every: int = 20) -> tuple[Rows, Rows]:
    """Splits rows into (training, held out): each `every`-th row is held out, starting with the first.

    A corpus of fewer than `every` rows is too small; then nothing is held out.
    """
    if len(rows) < every:
        return rows, Rows(rows.token_ids[:0], rows.segment_ids[:0])
    held_out = np.arange(len(rows)) % every == 0
    return (
        Rows(rows.token_ids[~held_out], rows.segment_ids[~held_out]),
        Rows(rows.token_ids[held_out], rows.segment_ids[held_out]),
    )
