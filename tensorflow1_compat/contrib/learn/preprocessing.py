"""Documents as ids: `tf.contrib.learn.preprocessing`."""

from __future__ import annotations

import collections
import pickle
import re

import numpy as np
import tensorflow.compat.v1 as tf

_WORD = re.compile(r"[A-Z]{2,}(?![a-z])|[A-Z][a-z]+(?=[A-Z])|[\'\w\-]+", re.UNICODE)


def tokenizer(iterator):
    """A list of words for each text."""
    for text in iterator:
        yield _WORD.findall(text)


class CategoricalVocabulary:
    """Ids of words; 0 is for the unknown.

    Args:
      unknown_token: the word of id 0.
      support_reverse: whether `reverse` works.
    """

    def __init__(self, unknown_token="<UNK>", support_reverse=True):
        self._unknown, self._mapping, self._freq = unknown_token, {unknown_token: 0}, collections.Counter()
        self._reverse = [unknown_token] if support_reverse else None
        self._is_frozen = False

    def __len__(self):
        return len(self._mapping)

    def freeze(self, freeze=True):
        """Whether unknown words stay unknown."""
        self._is_frozen = freeze

    def get(self, category):
        """The id of a word; a new one before `freeze`."""
        if category not in self._mapping:
            if self._is_frozen:
                return 0
            self._mapping[category] = len(self._mapping)
            if self._reverse is not None:
                self._reverse.append(category)
        return self._mapping[category]

    def add(self, category, count=1):
        """Counts a word."""
        if self.get(category) > 0:
            self._freq[category] += count

    def trim(self, min_frequency, max_frequency=-1):
        """Forgets words that came no more than `min_frequency` times, or as often as `max_frequency` (if above 0)."""
        kept = [
            (word, count) for word, count in sorted(self._freq.items(), key=lambda each: (-each[1], each[0]))
            if count > min_frequency and (max_frequency <= 0 or count < max_frequency)
        ]  # fmt: skip
        self._freq, self._mapping = collections.Counter(dict(kept)), {self._unknown: 0}
        self._mapping.update({word: place for place, (word, _) in enumerate(kept, 1)})
        if self._reverse is not None:
            self._reverse = list(self._mapping)

    def reverse(self, class_id):
        """The word of an id."""
        if self._reverse is None:
            raise ValueError("CategoricalVocabulary: support_reverse is False.")
        return self._reverse[class_id]


class VocabularyProcessor:
    """Documents as rows of word ids.

    Args:
      max_document_length: length of a row; longer documents are cut, shorter ones end with zeros.
      min_frequency: words that came no more often are unknown.
      vocabulary: a `CategoricalVocabulary`; default: a new one.
      tokenizer_fn: texts -> lists of words.
    """

    def __init__(self, max_document_length, min_frequency=0, vocabulary=None, tokenizer_fn=None):
        self.max_document_length, self.min_frequency = max_document_length, min_frequency
        self.vocabulary_ = vocabulary if vocabulary is not None else CategoricalVocabulary()
        self._tokenizer = tokenizer_fn or tokenizer

    def fit(self, raw_documents, unused_y=None):
        """Learns the words of documents; returns self."""
        for words in self._tokenizer(raw_documents):
            for word in words:
                self.vocabulary_.add(word)
        if self.min_frequency > 0:
            self.vocabulary_.trim(self.min_frequency)
        self.vocabulary_.freeze()
        return self

    def transform(self, raw_documents):
        """Yields int64 rows of ids."""
        for words in self._tokenizer(raw_documents):
            row = np.zeros(self.max_document_length, np.int64)
            for place, word in enumerate(words[: self.max_document_length]):
                row[place] = self.vocabulary_.get(word)
            yield row

    def fit_transform(self, raw_documents, unused_y=None):
        """`fit`, then `transform`."""
        self.fit(raw_documents)
        return self.transform(raw_documents)

    def reverse(self, documents):
        """Yields texts of rows of ids."""
        for row in documents:
            yield " ".join(self.vocabulary_.reverse(word) for word in row)

    def save(self, filename):
        """Writes the processor to a file."""
        with tf.gfile.Open(filename, "wb") as file:
            file.write(pickle.dumps(self))

    @classmethod
    def restore(cls, filename):
        """Reads a processor from a file that `save` wrote; only read files that you trust."""
        with tf.gfile.Open(filename, "rb") as file:
            return pickle.loads(file.read())
