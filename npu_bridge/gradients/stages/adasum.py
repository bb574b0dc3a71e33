"""Adasum: gradients of different ranks are combined in pairs, by how much they point the same way."""

from __future__ import annotations

import logging
from typing import Any

import numpy as np
import tensorflow as tf

from npu_bridge import collective
from npu_bridge.collective.communicator import Communicator
from npu_bridge.gradients.arithmetic import in_true_units, map_values
from npu_bridge.gradients.stages.all_reduce import AllReduce, fragments_of, when_ready
from npu_bridge.options.errors import message, say_once, shown

# A square root of the smallest normal float64: a gradient of a smaller squared norm counts as zero.
_LEAST_SQUARED_NORM = 1.5e-154


@tf.keras.utils.register_keras_serializable(package="npu_bridge")
class Adasum(AllReduce):
    """Combines the gradients of all ranks by Adasum, in place of the all-reduce that averages them.

    Two gradients a and b of one variable become (1 - a.b / 2|a|^2) a + (1 - a.b / 2|b|^2) b: their sum where they are
    orthogonal, their mean where they are the same. More than two are combined in a binary tree of neighbouring ranks,
    or of neighbouring groups of ranks whose gradients are averaged first. Sparse gradients stay sparse and give what
    dense ones would.

    A step whose gradients are not usable on one rank is skipped on all, whatever is made of them. A sum can also be
    too large where no gradient is, so the results are judged, too.

    Args:
      averaged_ranks: how many neighbouring ranks average their gradients before Adasum combines the means: 1 for none,
        "host" for those of one host.
    Raises:
      TypeError: `averaged_ranks` is neither an integer nor "host".
      ValueError: it is below 1. When gradients are computed: the number of averaging groups is not a power of two.
    Graph: for each aggregation fragment and each level of the tree a transfer between pairs, half as long as that of
      the level before, and one of three numbers for each variable; at last an all-gather. Together a rank sends about
      as much as in an all-reduce.
    """

    needs = ("a verdict",)

    def __init__(self, averaged_ranks: int | str = 1):
        super().__init__(type(self).__name__)
        expected, mend = "ranks, at least 1, or 'host'", "Leave it out to combine every two ranks."
        if averaged_ranks != "host":
            if isinstance(averaged_ranks, (bool, str)) or not isinstance(averaged_ranks, int):
                problem = "averaged_ranks is no number of ranks"
                raise TypeError(message("Adasum", problem, expected, shown(averaged_ranks), mend))
            if averaged_ranks < 1:
                raise ValueError(
                    message("Adasum", "averaged_ranks is out of range", expected, shown(averaged_ranks), mend)
                )
        self._averaged_ranks = averaged_ranks

    def get_config(self):
        return {"averaged_ranks": self._averaged_ranks}

    def named(self, name: str) -> None:
        """Sets the prefix of the transfers' names."""
        self._name = name

    def describe(self, step, plan):
        super().describe(step, plan)
        ranks = collective.current()
        if ranks.size > 1:
            plan.settings["Adasum"] = f"averaged_ranks={_averaged(self._averaged_ranks, ranks)}"

    def collect(self, step):
        if collective.current().size > 1:
            step.needs_recheck = True

    def reduce(self, step):
        ranks = collective.current()
        if ranks.size == 1:
            return
        tree = _Tree(ranks, _averaged(self._averaged_ranks, ranks))
        with tf.name_scope(f"{self._name}_Adasum"):
            sent = [None if grad is None else _wide(grad, step.divisor) for grad in when_ready(step.on_wire)]
            gradients, names = [grad for grad, _ in step.grads_and_vars], [var.name for _, var in step.grads_and_vars]
            results = {}
            for number, positions in enumerate(fragments_of(gradients, names)):
                dense = [sent[position] for position in positions]
                results.update(zip(positions, _dense(dense, tree, f"{self._name}_adasum_{number}")))
            for position, grad in enumerate(sent):
                if isinstance(grad, tf.IndexedSlices):
                    results[position] = _sparse(grad, tree, f"{self._name}_adasum_sparse_{position}")
            step.grads_and_vars = [
                (None if grad is None else _with_dtype_of(grad, results[position]), variable)
                for position, (grad, variable) in enumerate(step.grads_and_vars)
            ]
        step.divisor = None


def _averaged(wanted: Any, ranks: Communicator) -> int:
    """How many neighbouring ranks average their gradients; all ranks are refused where that cannot be."""
    averaged = ranks.local_size if wanted == "host" else wanted
    groups, left = divmod(ranks.size, averaged)
    if left or groups & (groups - 1) or not groups:
        problem = "gradients are combined in pairs, pairs of pairs and so on"
        what = "ranks" if averaged == 1 else f"groups of {averaged} ranks that average"
        got = f"{ranks.size} ranks" if averaged == 1 else f"{ranks.size} ranks in groups of {averaged}"
        mend = "Start another number of ranks, or leave Adasum out."
        raise ValueError(message("Adasum", problem, f"1, 2, 4, 8... {what}", got, mend))
    if wanted == "host" and ranks.local_rank != ranks.rank % averaged:
        problem = "ranks of one host are not neighbours"
        expected = f"rank {ranks.rank} as number {ranks.rank % averaged} of its host"
        mend = "Start the ranks host by host, as many on each."
        raise ValueError(message("Adasum", problem, expected, f"number {ranks.local_rank}", mend))
    if groups == 1:
        say_once(logging.INFO, f"Adasum: all {ranks.size} ranks average their gradients; none are left to combine.")
    return averaged


def _wide(grad, divisor):
    """A gradient in true units, with 32 bits at least."""
    widened = map_values(grad, lambda values: tf.cast(values, tf.float32) if values.dtype.size < 4 else values)
    return in_true_units(widened, divisor)


def _with_dtype_of(grad, result):
    if isinstance(grad, tf.IndexedSlices):
        return tf.IndexedSlices(tf.cast(result.values, grad.dtype), result.indices, grad.dense_shape)
    return tf.ensure_shape(tf.cast(result, grad.dtype), grad.shape)


def _dense(grads, tree, name):
    """The results for the dense gradients of a fragment; one of unknown shape goes alone."""
    results = {}
    for dtype in dict.fromkeys(grad.dtype for grad in grads):
        of_dtype = [number for number, grad in enumerate(grads) if grad.dtype == dtype]
        known = [number for number in of_dtype if grads[number].shape.is_fully_defined()]
        sizes = [grads[number].shape.num_elements() for number in known]
        if known:
            flat = tf.concat([tf.reshape(grads[number], [-1]) for number in known], axis=0)
            parts = tf.split(tree.combined(flat, sizes, f"{name}_{dtype.name}"), sizes)
            results.update(zip(known, parts))
        for number in set(of_dtype).difference(known):
            flat = tf.reshape(grads[number], [-1])
            results[number] = tree.combined(flat, None, f"{name}_{dtype.name}_{number}")
    return [tf.reshape(results[number], tf.shape(grad)) for number, grad in enumerate(grads)]


def _sparse(grad, tree, name):
    """The result for a sparse gradient, of the rows that any rank has, each once and in ascending order."""
    rows = tf.sort(tf.unique(tree.ranks.all_gather(grad.indices, f"{name}_indices"))[0])
    own = tf.math.unsorted_segment_sum(grad.values, tf.searchsorted(rows, grad.indices), tf.size(rows))
    combined = tree.combined(tf.reshape(own, [-1]), None, name)
    values = tf.ensure_shape(tf.reshape(combined, tf.shape(own)), [None, *grad.values.shape[1:]])
    return tf.IndexedSlices(values, rows, grad.dense_shape)


class _Tree:
    """Combines vectors of all ranks, each rank a part of them, and gives the whole to all.

    First the ranks of a group exchange equal pieces and average them, so that each has one piece. At each level a rank
    then keeps one half of its piece, gets the same half from a rank that is `2**level` groups away, and gives away the
    other half. Every number of the result is computed on one rank alone, so all ranks have the same bits.

    Args:
      ranks: all of them.
      averaged: the size of the groups, of which there is a power of two.
    """

    def __init__(self, ranks: Communicator, averaged: int):
        self.ranks = ranks
        self._averaged = averaged
        self._groups = ranks.size // averaged

    def combined(self, flat: tf.Tensor, sizes: list[int] | None, name: str) -> tf.Tensor:
        """The tree's result for a vector.

        Args:
          flat: vector of 32 or 64 bits, of the same length on all ranks.
          sizes: lengths of the tensors it consists of, each of which is combined by itself; None for one tensor.
          name: of the transfers.
        """
        ranks, averaged = self.ranks, self._averaged
        length = tf.size(flat) if sizes is None else sum(sizes)
        padding = ranks.size - length % ranks.size  # never none, so that no transfer is empty
        lengths = None if sizes is None else [*sizes, padding]
        piece = tf.pad(flat, [[0, padding]])
        group, place = divmod(ranks.rank, averaged)
        if averaged > 1:
            neighbours = range(group * averaged, (group + 1) * averaged)
            pieces = self._exchanged(piece, neighbours, f"{name}_group")
            piece = tf.reduce_mean(tf.reshape(pieces, [averaged, -1]), axis=0)
        for level in range(self._groups.bit_length() - 1):
            distance = 2**level
            is_upper = bool(group & distance)
            kept, given = tf.split(piece, 2)[:: -1 if is_upper else 1]
            other = (group ^ distance) * averaged + place
            received = self._exchanged(given, [other], f"{name}_level_{level}")
            pair = (received, kept) if is_upper else (kept, received)
            first_group = group - group % (2 * distance)
            block = slice(first_group * averaged, (first_group + 2 * distance) * averaged)
            start = _start(group, place, level + 1, self._groups) * ((length + padding) // ranks.size)
            segments = _Segments(lengths, start, (length + padding) // averaged // (2 * distance))
            piece = self._pair(pair, segments, block, f"{name}_products_{level}")
        pieces = tf.reshape(ranks.all_gather(piece, f"{name}_pieces"), [ranks.size, -1])
        levels = self._groups.bit_length() - 1
        starts = [_start(*divmod(rank, averaged), levels, self._groups) for rank in range(ranks.size)]
        return tf.reshape(tf.gather(pieces, np.argsort(starts)), [-1])[:length]

    def _exchanged(self, tensor, others, name):
        """Gives each of some ranks, in their order, an equal part of a tensor, and gets theirs."""
        share = [int(rank in others) for rank in range(self.ranks.size)]
        counts = tf.constant(share, tf.int32) * (tf.size(tensor) // len(others))
        received = self.ranks.all_to_all(tensor, counts, name)[0]
        return tf.reshape(received, tf.shape(tensor))

    def _pair(self, pair, segments, block, name):
        """One piece of what a pair of vectors becomes; the ranks of the block have the other pieces."""
        parts = [segments.cut(tf.cast(tensor, tf.float64)) for tensor in pair]  # whose squares are finite
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
    """Where the piece of a rank begins after so many levels, in pieces as they are at the end."""
    return place * groups + sum((group >> level & 1) * (groups >> (level + 1)) for level in range(levels))


class _Segments:
    """The parts of a piece that belong to different tensors.

    Args:
      lengths: of all tensors, one after the other; None where they are one.
      start: where the piece begins.
      length: of the piece.
    """

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
        """The parts."""
        return [piece] if self._lengths is None else tf.split(piece, self._inside)

    def spread(self, rows):
        """Rows of numbers for each part, as a matrix with a row for each tensor."""
        return tf.pad(tf.stack(rows), [[self._first, self._all - self._first - self._count], [0, 0]])

    def own(self, numbers):
        """Of a vector of numbers for each tensor those of the parts."""
        return numbers[self._first : self._first + self._count]
