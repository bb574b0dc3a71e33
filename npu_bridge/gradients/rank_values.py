"""Saves and restores what stages keep on each rank, such as error feedback, in the one checkpoint that rank 0 writes.

Gradients that a rank did not send, or the sums of its window, differ from rank to rank. So rank 0 has a second variable
for each of them, with a row for every rank: `gather` fills it for a checkpoint. Whoever finds rows there before a step
takes its own one, bit for bit, and empties the variable; so it does not matter who restored it, or how, nor whether the
training that wrote it just goes on.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from npu_bridge import collective
from npu_bridge.collective.horovod_tensors import never_pruned
from npu_bridge.collective.packing import packed, unpacked
from npu_bridge.gradients.graph_mode import building_graph, run_if, state_variable, tensors_if
from npu_bridge.tf_internals.graphs import is_compiled_by_xla

_KEY = ("npu_bridge", "of_ranks")  # TensorFlow exports collections with text keys only


def without_rows(variables: Sequence[tf.Variable]) -> list:
    """The variables of the graph being built that can be broadcast.

    Those with rows have other shapes on rank 0 than elsewhere; they are sent before the first step (`start_values`).
    """
    rows = {variable.ref() for variable in tf.compat.v1.get_default_graph().get_collection_ref(_KEY)}
    return [variable for variable in variables if variable.ref() not in rows]


class RankValues:
    """The values of all ranks, of variables whose values are each rank's own.

    Attributes:
      module: holds the variables with the rows, for checkpoints; these are empty but around a checkpoint.
    """

    def __init__(self):
        self.module = tf.Module(name="of_ranks")
        self._kept: dict = {}

    def make(self, variables: Sequence[tf.Variable]) -> None:
        """Makes an empty variable for the rows of each variable that has none yet."""
        for variable in variables:
            if variable.ref() not in self._kept:
                rows = _empty_rows(variable)
                self._kept[variable.ref()] = (variable, rows)
                setattr(self.module, f"rows_{len(self._kept) - 1}", rows)  # where object-based checkpoints find it

    def take(self) -> Any:
        """Gives each variable this rank's row, where there are rows; another number of ranks gets their mean.

        Returns:
          The op, None when executed eagerly or where there is nothing to do; what reads the variables must wait for it.
        """
        # A compiled function has no variables that change their shape; it trains on one rank.
        if not self._kept or not tf.executing_eagerly() and is_compiled_by_xla(tf.compat.v1.get_default_graph()):
            return None
        with tf.name_scope("OfRanks"):
            (_, first), *_ = self._kept.values()
            return run_if(tf.shape(first.read_value())[0] > 0, self._take)

    def gather(self, name: str) -> Any:
        """Fills the rows on rank 0 by a transfer of this name; returns the op to run, None when executed eagerly.

        Ranks: collective.
        """
        ranks, kept = collective.current(), list(self._kept.values())
        if ranks.size == 1 or not kept:
            return None if tf.executing_eagerly() else tf.no_op()
        words = packed([variable.read_value() for variable, _ in kept])
        received, _ = ranks.all_to_all(words, tf.stack([tf.size(words), *[0] * (ranks.size - 1)]), name)
        if ranks.rank > 0:
            return never_pruned(received)
        specs = [tf.TensorSpec(variable.shape, variable.dtype.base_dtype) for variable, _ in kept]
        values_of_ranks = unpacked(received, [specs] * ranks.size)
        filled = [rows.assign(tf.stack(values)) for (_, rows), values in zip(kept, zip(*values_of_ranks))]
        return None if tf.executing_eagerly() else tf.group(*filled)

    def _take(self):
        taken = [variable.assign(_own_row(rows.read_value())) for variable, rows in self._kept.values()]
        with tf.control_dependencies([] if tf.executing_eagerly() else taken):
            empty = [rows.assign(tf.zeros([0, *variable.shape], rows.dtype)) for variable, rows in self._kept.values()]
        return None if tf.executing_eagerly() else tf.group(*empty)


def _empty_rows(variable):
    shape, dtype = variable.shape, variable.dtype.base_dtype
    any_rows = tf.TensorShape([None, *shape])
    # The initial value can have rows, too: that is how values are put into the variables of a finished graph.
    made = state_variable(
        lambda: tf.raw_ops.PlaceholderWithDefault(input=tf.zeros([0, *shape], dtype), shape=any_rows),
        f"of_ranks/{variable.name.partition(':')[0]}",
        any_rows,
    )
    if building_graph():
        made.graph.get_collection_ref(_KEY).append(made)
    return made


def _own_row(rows):
    ranks, count = collective.current(), tf.shape(rows)[0]

    def of_others():
        text = (
            "npu_bridge: the checkpoint holds what each of",
            count,
            f"ranks kept for itself; now each of {ranks.size} goes on with the mean.",
        )
        printed = tf.print(*text, output_stream=sys.stderr) if ranks.rank == 0 else None
        with tf.control_dependencies([] if printed is None else [printed]):
            return [_mean(rows)]

    (own,) = tensors_if(tf.equal(count, ranks.size), lambda: [rows[ranks.rank]], of_others)
    return own


def _mean(rows):
    if rows.dtype.is_floating:
        return tf.reduce_mean(rows, axis=0)
    return tf.reduce_any(rows, axis=0) if rows.dtype == tf.bool else rows[0]
