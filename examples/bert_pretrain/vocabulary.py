"""Learns a sub-word vocabulary from the corpus.

Pieces are found by byte-pair merging over characters: start from single characters and keep joining the
pair of neighbours that occurs most often. Text is then cut into pieces by longest match from the left.
Both steps are deterministic, so every rank that builds a vocabulary from the same text gets the same one.
"""

from __future__ import annotations

import collections
import heapq
import os
import re
from collections.abc import Iterable, Sequence

PAD, UNKNOWN, CLS, SEP, MASK = "[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"
SPECIAL_PIECES = (PAD, UNKNOWN, CLS, SEP, MASK)
PAD_ID, UNKNOWN_ID, CLS_ID, SEP_ID, MASK_ID = range(len(SPECIAL_PIECES))

# Means "a space came before", so that joining text undoes cutting it.
WORD_START = "\u2581"

# A word is a run of letters, one digit, a run of underscores, or a run of other marks.
_WORD = re.compile(r"(\s*)([^\W\d_]+|\d|_+|[^\w\s]+)")

# A pair seen fewer times than this teaches nothing (ours; small enough for a half-megabyte corpus).
_MIN_PAIR_COUNT = 2


def split_words(text: str) -> list[str]:
    """Cuts text into words; a word after white space begins with the word-start mark."""
    return [(WORD_START if space else "") + word for space, word in _WORD.findall(" " + text.strip())]


class Vocabulary:
    """A list of pieces; the position of a piece in the list is its id.

    Args:
      pieces: all pieces, the five special ones first.
      lower_case: lower-cases text before it is cut.
    Raises:
      ValueError: the list does not begin with the special pieces, or a piece occurs twice.
    """

    def __init__(self, pieces: Sequence[str], lower_case: bool = True):
        if tuple(pieces[: len(SPECIAL_PIECES)]) != SPECIAL_PIECES:
            raise ValueError(
                f"Vocabulary: expected a list that begins with {', '.join(SPECIAL_PIECES)}; "
                f"got {list(pieces[:5])}. Build one with build_vocabulary()."
            )
        self.pieces = list(pieces)
        self.lower_case = lower_case
        self._ids = {piece: index for index, piece in enumerate(self.pieces)}
        if len(self._ids) != len(self.pieces):
            raise ValueError(f"Vocabulary: {len(self.pieces) - len(self._ids)} piece(s) occur twice.")
        self._longest = max(len(piece) for piece in self.pieces)
        self._cut_words: dict[str, list[int]] = {}

    def __len__(self) -> int:
        return len(self.pieces)

    def encode(self, text: str) -> list[int]:
        """Turns text into piece ids, without any special piece around it."""
        ids: list[int] = []
        for word in split_words(text.lower() if self.lower_case else text):
            cut = self._cut_words.get(word)
            if cut is None:
                cut = self._cut_words[word] = self._cut(word)
            ids.extend(cut)
        return ids

    def decode(self, ids: Iterable[int]) -> str:
        """Turns piece ids back into text; runs of white space come back as one space."""
        return "".join(self.pieces[index] for index in ids).replace(WORD_START, " ").strip()

    def _cut(self, word: str) -> list[int]:
        ids, start = [], 0
        while start < len(word):
            for end in range(min(len(word), start + self._longest), start, -1):
                found = self._ids.get(word[start:end])
                if found is not None:
                    break
            else:
                end, found = start + 1, UNKNOWN_ID
            ids.append(found)
            start = end
        return ids

    def save(self, path: str) -> None:
        """Writes one piece per line, atomically."""
        temporary = f"{path}.{os.getpid()}.tmp"
        with open(temporary, "w", encoding="utf-8") as out:
            out.write(f"# lower_case={int(self.lower_case)}\n")
            out.writelines(piece + "\n" for piece in self.pieces)
        os.replace(temporary, path)

    @classmethod
    def load(cls, path: str) -> Vocabulary:
        """Reads a file written by `save`."""
        with open(path, encoding="utf-8") as lines:
            header, *pieces = lines.read().split("\n")
        if not header.startswith("# lower_case="):
            raise ValueError(f"{path}: not a vocabulary file; expected a first line '# lower_case=0' or '=1'.")
        return cls([piece for piece in pieces if piece], lower_case=header.endswith("1"))


def build_vocabulary(texts: Iterable[str], size: int, lower_case: bool = True) -> Vocabulary:
    """Learns at most `size` pieces from texts.

    Args:
      texts: the documents to learn from.
      size: number of pieces, with the five special ones. A small corpus can have fewer.
      lower_case: learn from lower-cased text.
    Returns:
      The vocabulary; always the same for the same texts and size.
    Raises:
      ValueError: `size` leaves no room for single characters, or there is no text.
    """
    words: dict[str, int] = collections.Counter()
    for text in texts:
        words.update(split_words(text.lower() if lower_case else text))
    if not words:
        raise ValueError("build_vocabulary: the corpus holds no words.")
    if size < 2 * len(SPECIAL_PIECES):
        raise ValueError(f"build_vocabulary: expected size of at least 10; got {size}.")
    pieces = list(SPECIAL_PIECES) + _alphabet(words, limit=(size - len(SPECIAL_PIECES) + 1) // 2)
    seen = set(pieces)
    for piece in _merged_pieces(words):
        if len(pieces) >= size:
            break
        if piece not in seen:  # two different pairs may join to the same text
            seen.add(piece)
            pieces.append(piece)
    return Vocabulary(pieces, lower_case)


def load_or_build(path: str, texts: Sequence[str], size: int, lower_case: bool, write: bool) -> Vocabulary:
    """Returns the vocabulary of an output folder: reads it if it exists, otherwise learns it from texts.

    A model needs the vocabulary that it was trained with, so an existing file is used unchanged.

    Ranks: local. Only the rank with `write=True` writes the file; the others learn the same pieces.
    """
    if os.path.exists(path):
        vocabulary = Vocabulary.load(path)
        if len(vocabulary) > size or vocabulary.lower_case != lower_case:
            raise ValueError(
                f"{path} does not fit the configuration. Expected at most {size} pieces, "
                f"lower_case={lower_case}; got {len(vocabulary)} pieces, lower_case={vocabulary.lower_case}. "
                "Use another --output_dir, or the --config the folder was made with."
            )
        return vocabulary
    vocabulary = build_vocabulary(texts, size, lower_case)
    if write:
        vocabulary.save(path)
    return vocabulary


def _alphabet(words: dict[str, int], limit: int) -> list[str]:
    counts: dict[str, int] = collections.Counter()
    for word, count in words.items():
        for character in word:
            counts[character] += count
    return [character for character, _ in sorted(counts.items(), key=lambda item: (-item[1], item[0]))[:limit]]


def _merged_pieces(words: dict[str, int]) -> Iterable[str]:
    """Yields joined pieces, most frequent pair first, ties in alphabetical order.

    Pair counts are updated word by word, and outdated entries of the heap are skipped when they come up: half a
    megabyte of text gives 2000 pieces in about a second.
    """
    texts = sorted(words)
    symbols = [list(text) for text in texts]
    weights = [words[text] for text in texts]
    counts: dict[tuple[str, str], int] = collections.Counter()
    homes: dict[tuple[str, str], set] = collections.defaultdict(set)
    for index, parts in enumerate(symbols):
        for pair in zip(parts, parts[1:]):
            counts[pair] += weights[index]
            homes[pair].add(index)
    heap = [(-count, pair) for pair, count in counts.items()]
    heapq.heapify(heap)
    while heap:
        negative, pair = heapq.heappop(heap)
        count = counts.get(pair, 0)
        if count != -negative:  # outdated: the true count, if any, has its own entry
            continue
        if count < _MIN_PAIR_COUNT:
            return
        yield pair[0] + pair[1]
        changed = set()
        for index in sorted(homes.pop(pair)):
            changed |= _join(pair, index, symbols, weights[index], counts, homes)
        counts.pop(pair, None)
        for other in changed:
            if other != pair and counts.get(other, 0) > 0:
                heapq.heappush(heap, (-counts[other], other))


def _join(pair, index, symbols, weight, counts, homes) -> set:
    """Joins a pair of neighbours inside one word; returns the pairs whose count has changed."""
    old = symbols[index]
    new: list[str] = []
    position = 0
    while position < len(old):
        if position + 1 < len(old) and (old[position], old[position + 1]) == pair:
            new.append(pair[0] + pair[1])
            position += 2
        else:
            new.append(old[position])
            position += 1
    symbols[index] = new
    changed = set()
    for neighbours in zip(old, old[1:]):
        counts[neighbours] -= weight
        changed.add(neighbours)
    for neighbours in zip(new, new[1:]):
        counts[neighbours] += weight
        homes[neighbours].add(index)
        changed.add(neighbours)
    return changed
