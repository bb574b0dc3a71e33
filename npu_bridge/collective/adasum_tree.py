"""Computes Adasum of vectors: combines those of different ranks in pairs, by how much they point the same way."""

from __future__ import annotations

import numpy as np
import tensorflow as tf

from npu_bridge.collective.communicator import Communicator

# The square root of the smallest normal float64: a vector with a smaller squared norm counts as zero.
_LEAST_SQUARED_NORM = 1.5e-154


class AdasumTree:
    """A tree that combines the ranks' vectors: each rank computes a part, and all ranks get the whole result.

    First the ranks of a group exchange equal pieces and average them, so that each has one piece. At each level a rank
    then keeps one half of its piece, receives the same half from a rank that is `2**level` groups away, and sends the
    other half. Only one rank computes each number of the result, so all ranks have the same bits.

    Args:
      ranks: the communicator of all ranks.
      averaged_ranks: size of the groups, whose number is a power of two; also an attribute.
    Attributes:
      groups: number of groups.
    """

    def __init__(self, ranks: Communicator, averaged_ranks: int):
        self.ranks = ranks
        self.averaged_ranks = averaged_ranks
        self.groups = ranks.size // averaged_ranks
        self._group, self._place = divmod(ranks.rank, averaged_ranks)
        self._neighbours = range(self._group * averaged_ranks, (self._group + 1) * averaged_ranks)

    def combined(self, flat: tf.Tensor, sizes: list[int] | None, name: str) -> tf.Tensor:
        """Returns the tree's result for a vector.

        Args:
          flat: vector of 32 or 64 bits, of the same length on all ranks.
          sizes: lengths of its tensors, which are combined separately; None for one tensor.
          name: prefix of the collectives' names.
        """
        padded, sizes = self._padded(flat, sizes)
        return self._up(self._mean_piece(padded, name), sizes, name)[: tf.size(flat)]

    def combined_of_groups(self, flat: tf.Tensor, sizes: list[int] | None, name: str) -> tf.Tensor:
        """Returns the tree's result for a vector that is the same on all ranks of a group, without averaging."""
        padded, sizes = self._padded(flat, sizes)
        return self._up(tf.split(padded, self.averaged_ranks)[self._place], sizes, name)[: tf.size(flat)]

    def mean(self, flat: tf.Tensor, sizes: list[int] | None, name: str) -> tf.Tensor:
        """Averages a vector over the ranks of this group, with the same bits on all of them; arguments as above."""
        padded, _ = self._padded(flat, sizes)
        return self.gathered(self._mean_piece(padded, name), f"{name}_mean")[: tf.size(flat)]

    def gathered(self, tensor: tf.Tensor, name: str) -> tf.Tensor:
        """Joins the tensors of this group's ranks along axis 0, in rank order; first dimensions may differ."""
        copies = tf.concat([tensor] * self.averaged_ranks, axis=0)
        gathered = self.ranks.all_to_all(copies, self._shares(self._neighbours) * tf.shape(tensor)[0], name)[0]
        return tf.ensure_shape(gathered, [None, *tensor.shape.as_list()[1:]])

    def _padded(self, flat, sizes):
        """Returns the vector padded to equal pieces, and the sizes with the padding."""
        length = tf.size(flat) if sizes is None else sum(sizes)
        padding = self.ranks.size - length % self.ranks.size  # at least 1, so that no collective is empty
        return tf.pad(flat, [[0, padding]]), None if sizes is None else [*sizes, padding]

    def _mean_piece(self, padded, name):
        """Returns this rank's piece of the mean over its group."""
        if self.averaged_ranks == 1:
            return padded
        pieces = self._exchanged(padded, self._neighbours, f"{name}_group")
        return tf.reduce_mean(tf.reshape(pieces, [self.averaged_ranks, -1]), axis=0)

    def _up(self, piece, sizes, name):
        """Combines the groups' vectors from the pieces that their ranks hold; returns the whole with padding."""
        ranks, averaged = self.ranks, self.averaged_ranks
        smallest = (tf.size(piece) if sizes is None else sum(sizes) // averaged) // self.groups
        for level in range(self.groups.bit_length() - 1):
            distance = 2**level
            is_upper = bool(self._group & distance)
            kept, given = tf.split(piece, 2)[:: -1 if is_upper else 1]
            other = (self._group ^ distance) * averaged + self._place
            received = self._exchanged(given, [other], f"{name}_level_{level}")
            pair = (received, kept) if is_upper else (kept, received)
            first_group = self._group - self._group % (2 * distance)
            block = slice(first_group * averaged, (first_group + 2 * distance) * averaged)
            start = _start(self._group, self._place, level + 1, self.groups) * smallest
            segments = _Segments(sizes, start, smallest * (self.groups // (2 * distance)))
            piece = self._pair(pair, segments, block, f"{name}_products_{level}")
        pieces = tf.reshape(ranks.all_gather(piece, f"{name}_pieces"), [ranks.size, -1])
        levels = self.groups.bit_length() - 1
        starts = [_start(*divmod(rank, averaged), levels, self.groups) for rank in range(ranks.size)]
        return tf.reshape(tf.gather(pieces, np.argsort(starts)), [-1])

    def _shares(self, others):
        """Returns a vector with a 1 for each of some ranks."""
        return tf.constant([int(rank in others) for rank in range(self.ranks.size)], tf.int32)

    def _exchanged(self, tensor, others, name):
        """Sends each of some ranks, in their order, an equal part of a tensor, and returns the parts received."""
        counts = self._shares(others) * (tf.size(tensor) // len(others))
        received = self.ranks.all_to_all(tensor, counts, name)[0]
        return tf.reshape(received, tf.shape(tensor))

    def _pair(self, pair, segments, block, name):
        """Returns one piece of a combined pair of vectors; the ranks of the block have the other pieces."""
        parts = [segments.cut(tf.cast(tensor, tf.float64)) for tensor in pair]  # squares are finite in float64
        products = segments.spread(
            [tf.stack([tf.reduce_sum(a * a), tf.reduce_sum(a * b), tf.reduce_sum(b * b)]) for a, b in zip(*parts)]
        )
        of_ranks = self.ranks.all_gather(products[tf.newaxis], name)
        squares, shared, other_squares = tf.unstack(tf.reduce_sum(of_ranks[block], axis=0), axis=1)
        factors = [
            segments.own(tf.where(norm > _LEAST_SQUARED_NORM, 1.0 - shared / (2.0 * norm), tf.ones_like(norm)))
            for norm in (squares, other_squares)
        ]
        combined = [factors[0][number] * a + factors[1][number] * b for number, (a, b) in enumerate(zip(*parts))]
        return tf.cast(tf.concat(combined, axis=0), pair[0].dtype)


def _start(group, place, levels, groups):
    """Returns where a rank's piece begins after some levels, in units of the final pieces."""
    return place * groups + sum((group >> level & 1) * (groups >> (level + 1)) for level in range(levels))


class _Segments:
    """The parts of a piece that belong to different tensors; `lengths` of all tensors is None for a single one."""

    def __init__(self, lengths, start, length):
        self._lengths = lengths
        if lengths is None:
            self._first, self._count, self._all = 0, 1, 1
            return
        ends = np.cumsum(lengths)
        begins = ends - lengths
        inside = np.minimum(ends, start + length) - np.maximum(begins, start)
        present = np.flatnonzero(inside > 0)
        self._first, self._count, self._all = int(present[0]), int(present[-1] - present[0] + 1), len(lengths)
        self._inside = [max(0, int(size)) for size in inside[self._first : self._first + self._count]]

    def cut(self, piece):
        """Cuts a piece into its parts."""
        return [piece] if self._lengths is None else tf.split(piece, self._inside)

    def spread(self, rows):
        """Spreads rows of numbers for each part to a matrix with a row for each tensor."""
        return tf.pad(tf.stack(rows), [[self._first, self._all - self._first - self._count], [0, 0]])

    def own(self, numbers):
        """Returns the parts' numbers from a vector with a number for each tensor."""
        return numbers[self._first : self._first + self._count]
