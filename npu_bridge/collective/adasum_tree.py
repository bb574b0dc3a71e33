"""Computes Adasum: combines the ranks' vectors in pairs, depending on the angle between the two vectors."""

from __future__ import annotations

import numpy as np
import tensorflow as tf

from npu_bridge.collective.engines.communicator import Communicator

# The square root of the smallest normal float64: a vector with a smaller squared norm counts as zero.
_LEAST_SQUARED_NORM = 1.5e-154


class AdasumTree:
    """A tree of pairwise combinations of the ranks' vectors. Each rank computes a part; all ranks get the whole result.

    First the ranks of a group exchange pieces of equal size and average them, so that each rank has one averaged piece.
    At each level of the tree a rank then keeps one half of its piece and exchanges the other half with a rank that is
    `2**level` groups away. Each number of the result is computed by one rank, so all ranks get the same bits.

    Args:
      ranks: the communicator of all ranks.
      averaged_ranks: size of a group; the number of groups is a power of two. Also an attribute.
    Attributes:
      groups: number of groups.
    """

    def __init__(self, ranks: Communicator, averaged_ranks: int):
        self.ranks = ranks
        self.averaged_ranks = averaged_ranks
        self.groups = ranks.size // averaged_ranks
        self._group, self._place = divmod(ranks.rank, averaged_ranks)
        self._neighbours = range(self._group * averaged_ranks, (self._group + 1) * averaged_ranks)

    def combine(self, vector: tf.Tensor, sizes: list[int] | None, name: str) -> tf.Tensor:
        """Combines a vector over all ranks: averages it in each group, then combines the groups' means.

        Args:
          vector: vector of 32 or 64 bits, of the same length on all ranks.
          sizes: lengths of the tensors in the vector, which are combined separately; None for one tensor.
          name: prefix of the collectives' names.
        """
        padded, sizes = self._pad_to_pieces(vector, sizes)
        return self._combine_levels(self._average_piece(padded, name), sizes, name)[: tf.size(vector)]

    def combine_groups(self, vector: tf.Tensor, sizes: list[int] | None, name: str) -> tf.Tensor:
        """Combines vectors of groups, without averaging; all ranks of a group must pass the same vector."""
        padded, sizes = self._pad_to_pieces(vector, sizes)
        return self._combine_levels(tf.split(padded, self.averaged_ranks)[self._place], sizes, name)[: tf.size(vector)]

    def mean(self, vector: tf.Tensor, sizes: list[int] | None, name: str) -> tf.Tensor:
        """Averages a vector over the ranks of this group, which all get the same bits; arguments as for `combine`."""
        padded, _ = self._pad_to_pieces(vector, sizes)
        return self.gather_in_group(self._average_piece(padded, name), f"{name}_mean")[: tf.size(vector)]

    def gather_in_group(self, tensor: tf.Tensor, name: str) -> tf.Tensor:
        """Joins the tensors of this group's ranks along axis 0, in rank order; first dimensions can differ."""
        copies = tf.concat([tensor] * self.averaged_ranks, axis=0)
        gathered = self.ranks.all_to_all(copies, self._membership_vector(self._neighbours) * tf.shape(tensor)[0], name)[
            0
        ]
        return tf.ensure_shape(gathered, [None, *tensor.shape.as_list()[1:]])

    def _pad_to_pieces(self, vector, sizes):
        """Pads a vector to a multiple of the number of ranks; returns the vector, and `sizes` with the padding."""
        length = tf.size(vector) if sizes is None else sum(sizes)
        padding = self.ranks.size - length % self.ranks.size  # at least 1, so that no collective is empty
        return tf.pad(vector, [[0, padding]]), None if sizes is None else [*sizes, padding]

    def _average_piece(self, padded, name):
        """Returns this rank's piece of the mean over its group."""
        if self.averaged_ranks == 1:
            return padded
        pieces = self._exchange_parts(padded, self._neighbours, f"{name}_group")
        return tf.reduce_mean(tf.reshape(pieces, [self.averaged_ranks, -1]), axis=0)

    def _combine_levels(self, piece, sizes, name):
        """Combines the groups' vectors level by level, given this rank's piece; returns the whole padded vector."""
        ranks, averaged = self.ranks, self.averaged_ranks
        smallest = (tf.size(piece) if sizes is None else sum(sizes) // averaged) // self.groups
        for level in range(self.groups.bit_length() - 1):
            distance = 2**level
            is_upper = bool(self._group & distance)
            kept, given = tf.split(piece, 2)[:: -1 if is_upper else 1]
            other = (self._group ^ distance) * averaged + self._place
            received = self._exchange_parts(given, [other], f"{name}_level_{level}")
            pair = (received, kept) if is_upper else (kept, received)
            first_group = self._group - self._group % (2 * distance)
            block = slice(first_group * averaged, (first_group + 2 * distance) * averaged)
            start = _start_of_piece(self._group, self._place, level + 1, self.groups) * smallest
            segments = _PieceSegments(sizes, start, smallest * (self.groups // (2 * distance)))
            piece = self._combine_pair(pair, segments, block, f"{name}_products_{level}")
        pieces = tf.reshape(ranks.all_gather(piece, f"{name}_pieces"), [ranks.size, -1])
        levels = self.groups.bit_length() - 1
        starts = [_start_of_piece(*divmod(rank, averaged), levels, self.groups) for rank in range(ranks.size)]
        return tf.reshape(tf.gather(pieces, np.argsort(starts)), [-1])

    def _membership_vector(self, member_ranks):
        """Returns a vector with a number for each rank: 1 for the ranks in `member_ranks`, else 0."""
        return tf.constant([int(rank in member_ranks) for rank in range(self.ranks.size)], tf.int32)

    def _exchange_parts(self, tensor, peer_ranks, name):
        """Sends equal parts of a tensor to the ranks in `peer_ranks`, and returns the received parts, in rank order."""
        counts = self._membership_vector(peer_ranks) * (tf.size(tensor) // len(peer_ranks))
        received = self.ranks.all_to_all(tensor, counts, name)[0]
        return tf.reshape(received, tf.shape(tensor))

    def _combine_pair(self, pair, segments, block, name):
        """Combines this rank's pieces of two vectors; the ranks of `block` combine the other pieces."""
        parts = [segments.split(tf.cast(tensor, tf.float64)) for tensor in pair]  # squares are finite in float64
        products = segments.pad_rows_to_all_tensors(
            [tf.stack([tf.reduce_sum(a * a), tf.reduce_sum(a * b), tf.reduce_sum(b * b)]) for a, b in zip(*parts)]
        )
        of_ranks = self.ranks.all_gather(products[tf.newaxis], name)
        squares, shared, other_squares = tf.unstack(tf.reduce_sum(of_ranks[block], axis=0), axis=1)
        factors = [
            segments.select_for_piece(
                tf.where(norm > _LEAST_SQUARED_NORM, 1.0 - shared / (2.0 * norm), tf.ones_like(norm))
            )
            for norm in (squares, other_squares)
        ]
        combined = [factors[0][number] * a + factors[1][number] * b for number, (a, b) in enumerate(zip(*parts))]
        return tf.cast(tf.concat(combined, axis=0), pair[0].dtype)


def _start_of_piece(group_index, place_in_group, level_count, group_count):
    """Returns where a rank's piece begins in the vector after `level_count` levels, in units of the final pieces."""
    skipped = sum((group_index >> level & 1) * (group_count >> (level + 1)) for level in range(level_count))
    return place_in_group * group_count + skipped


class _PieceSegments:
    """Splits a rank's piece of the joined vector at the borders of tensors; one segment if `lengths` is None."""

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

    def split(self, piece):
        """Splits a piece into its segments."""
        return [piece] if self._lengths is None else tf.split(piece, self._inside)

    def pad_rows_to_all_tensors(self, rows):
        """Returns a matrix with a row for each tensor of the vector; tensors without a segment here get zeros."""
        return tf.pad(tf.stack(rows), [[self._first, self._all - self._first - self._count], [0, 0]])

    def select_for_piece(self, numbers):
        """Selects, from a vector with a number for each tensor, the numbers of the tensors in this piece."""
        return numbers[self._first : self._first + self._count]
