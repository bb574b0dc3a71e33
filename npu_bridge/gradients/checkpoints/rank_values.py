"""Saves and restores stage state that differs between ranks, such as error feedback, in the checkpoints of rank 0.

Gradients that a rank did not send, and sums of an accumulation window, differ between ranks. For each such variable,
rank 0 has a second variable with a row for every rank. `gather` fills the rows for a checkpoint. If rows exist before a
step, each rank sets its variable to its own row, bit for bit, and the rows are deleted. This works for every way to
restore, and also if the training continues after the save. With another number of ranks, all ranks get the mean of the
rows (see the table in `kept_state`).
"""

from __future__ import annotations

import collections
import weakref
from collections.abc import Iterable, Sequence
from typing import Any

from npu_bridge import collective
from npu_bridge.base.own_tensorflow import tf
from npu_bridge.base.tf_internals.graphs import is_compiled_by_xla
from npu_bridge.base.tf_internals.sessions import run_without_engines
from npu_bridge.collective import wire_names
from npu_bridge.collective.checks import first_run
from npu_bridge.collective.engines.transfer_tensors import prevent_pruning
from npu_bridge.gradients.checkpoints.kept_state import OF_RANKS
from npu_bridge.gradients.checkpoints.packing import pack_tensors, unpack_tensors
from npu_bridge.gradients.graph_mode import (
    check_made_in_this_graph,
    group_in_graph,
    is_building_graph,
    run_if,
    state_variable,
)

# Not strings, so TensorFlow does not export the collections.
_COLLECTION = ("npu_bridge", "of_ranks")
_RESTORE_CHECKS = ("npu_bridge", "restore_checks")


def broadcastable_variables(variables: Sequence[tf.Variable]) -> list:
    """Returns `variables` without those that hold a row for each rank, which cannot be broadcast.

    Such variables have another shape on rank 0; `start_values` sends them before the first step.
    """
    rows = {variable.ref() for variable in tf.compat.v1.get_default_graph().get_collection_ref(_COLLECTION)}
    return [variable for variable in variables if variable.ref() not in rows]


class RankValues:
    """The rows that hold the values of all ranks, for variables that differ between ranks.

    Attributes:
      module: a `tf.Module` with the variables that hold the rows, for checkpoints. They are empty except while a
        checkpoint is saved or restored.
    """

    def __init__(self):
        self.module = tf.Module(name="of_ranks")
        self._kept: dict = {}
        self._counts: collections.Counter = collections.Counter()

    @property
    def variables(self) -> list:
        """The variables that differ between ranks."""
        return [variable for variable, _ in self._kept.values()]

    def create_row_for_each_rank(self, variables: Sequence[tf.Variable], kind: str = "") -> None:
        """Creates, for each variable that has none yet, an empty variable for the rows: one row for each rank.

        Args:
          variables: the variables.
          kind: what they are; outside of TF 1 graphs rows are named by kind and number. By default, and in TF 1 graphs,
            they have the names of the variables.
        """
        check_made_in_this_graph([*self.variables, *variables])
        for variable in variables:
            if variable.ref() not in self._kept:
                name = variable.name.partition(":")[0]
                if kind and not is_building_graph():  # names of layers and slots can change until a file is loaded
                    name = f"{kind}_{self._counts[kind]}"
                    self._counts[kind] += 1
                rows = _empty_rows(variable, name)
                self._kept[variable.ref()] = (variable, rows)
                setattr(self.module, f"rows_{len(self._kept) - 1}", rows)  # where object-based checkpoints find it

    def restore_from_own_rows(self) -> Any:
        """Sets each variable to the row with this rank's value, if a checkpoint filled the rows.

        If the checkpoint is from another number of ranks, sets the variable to the mean of the rows.

        Returns:
          The op, for which readers of the variables must wait; None in eager execution or if there are no rows to take.
        """
        # A function compiled by XLA cannot have variables whose shape changes; it trains on one rank.
        if not self._kept or not tf.executing_eagerly() and is_compiled_by_xla(tf.compat.v1.get_default_graph()):
            return None
        with tf.name_scope("OfRanks"):
            return run_if(tf.reduce_any(tf.stack(self._count_rows()) > 0), self._assign_and_empty_rows)

    def gather(self, name: str, stores_own_rows: bool = False) -> Any:
        """Gathers the values of all ranks into the rows on rank 0.

        Args:
          name: name of the collective.
          stores_own_rows: whether each rank above 0 stores its own values as a row, which `restore_from_own_rows`
            then restores.
        Returns:
          The op to run; None in eager execution.
        Ranks: collective.
        """
        ranks, kept = collective.current(), list(self._kept.values())
        if ranks.size == 1 or not kept:
            return None if tf.executing_eagerly() else tf.no_op()
        values = [tf.identity(variable.read_value()) for variable, _ in kept]
        words = pack_tensors(values)
        received, _ = ranks.all_to_all(words, tf.stack([tf.size(words), *[0] * (ranks.size - 1)]), name)
        if ranks.rank > 0 and not stores_own_rows:
            return prevent_pruning(received)
        if ranks.rank > 0:
            with tf.control_dependencies([] if tf.executing_eagerly() else [prevent_pruning(received)]):
                filled = [rows.assign(value[tf.newaxis]) for (_, rows), value in zip(kept, values)]
        else:
            specs = [tf.TensorSpec(variable.shape, variable.dtype.base_dtype) for variable, _ in kept]
            values_of_ranks = unpack_tensors(received, [specs] * ranks.size)
            filled = [rows.assign(tf.stack(each)) for (_, rows), each in zip(kept, zip(*values_of_ranks))]
        return group_in_graph(*filled)

    def counts(self) -> dict[str, int]:
        """Returns, by variable name, the number of ranks whose values the rows hold now; for eager execution only."""
        return {variable.name: int(count) for (variable, _), count in zip(self._kept.values(), self._count_rows())}

    def _count_rows(self):
        zero, one = tf.constant([0]), tf.constant([1])
        shapes = [tf.raw_ops.VariableShape(input=rows.handle) for _, rows in self._kept.values()]
        return [_slice(shape, zero, one, one, shrink_axis_mask=1) for shape in shapes]

    def _assign_and_empty_rows(self):
        taken = [
            variable.assign(value)
            for variable, value in zip(self.variables, _rows_of_this_rank(self._kept.values(), self._count_rows()))
        ]
        with tf.control_dependencies([] if tf.executing_eagerly() else taken):
            empty = [
                rows.assign(tf.zeros([0, *variable.shape.as_list()], rows.dtype))
                for variable, rows in self._kept.values()
            ]
        return group_in_graph(*empty)


class RestoreOwnValues(first_run.FirstRunCheck):
    """A check of session runs that restores this rank's values before a training run.

    The values come from variables with a row for each rank. A training step of a TF 1 graph reads weights before any
    operator of this package runs. So a rank takes its row in a separate run: before the first training run of a
    session, and after rows were filled or restored.

    Args:
      values: the `RankValues` of the current graph.
    Attributes:
      done_in: the sessions whose variables have this rank's values.
      filling: the check of session runs that fill the rows.
    """

    def __init__(self, values: RankValues):
        super().__init__()
        self._values = values
        graph = tf.compat.v1.get_default_graph()
        others = graph.get_collection_ref(_RESTORE_CHECKS)
        if others:  # a run of one optimizer can read the weights of another one, so it restores them, too
            self.transfers = others[0].transfers
        others.append(self)
        self.done_in: weakref.WeakSet = weakref.WeakSet()
        self.filling = _FilledRowsCheck(self)
        for check in (self, self.filling):
            first_run.find_or_add_check(graph, check, lambda check=check: check)

    def add_update(self, transfers: Iterable[str]) -> None:
        """Adds an update, whose variables have been made: a run of any update restores the values of all.

        Args:
          transfers: full names of the collectives of the update.
        """
        self.transfers.update(transfers)
        with tf.init_scope():
            self._take_rows = tf.group(self._values.restore_from_own_rows())

    def is_due(self, session):
        return session not in self.done_in

    def make_check(self, session, run):
        try:
            run_without_engines(session, targets=[self._take_rows])
        except tf.errors.FailedPreconditionError:
            return  # a variable is uninitialised; the training run raises the error
        self.done_in.add(session)


class _FilledRowsCheck(first_run.FirstRunCheck):
    """A check of runs that fill the rows; makes the session restore its values from the rows before it trains again."""

    def __init__(self, restore_own):
        super().__init__()
        self._restore_own = restore_own

    def is_due(self, session):
        return session in self._restore_own.done_in

    def make_check(self, session, run):
        self._restore_own.done_in.discard(session)


def reread_restored_rows(graph: tf.Graph | None, session: Any) -> None:
    """Makes a session read this rank's values from the rows again, because a restore may have changed the rows."""
    for restore_own in graph.get_collection_ref(_RESTORE_CHECKS) if graph is not None else ():
        restore_own.done_in.discard(session)


def gather_and_restore(values: RankValues, name: str, restore_own_values: RestoreOwnValues | None) -> Any:
    """Calls `RankValues.gather`; before the next training run, `restore_own_values` restores each rank's values.

    If `restore_own_values` is None, the next step itself restores the values. If no step has run since the last call,
    the variables have the mean of the ranks, and their own values are still in the rows.
    """
    taken = values.restore_from_own_rows()
    with tf.control_dependencies([] if taken is None or tf.executing_eagerly() else [taken]):
        with wire_names.record_collective_names() as transfers:
            op = values.gather(name, stores_own_rows=True)
    if restore_own_values is not None:
        restore_own_values.filling.transfers.update(transfers)
    return op


def _empty_rows(variable, name):
    shape, dtype = variable.shape, variable.dtype.base_dtype
    any_rows = tf.TensorShape([None, *shape])
    # The initial value can have rows, too: feeding it sets the variables of a finished graph.
    made = state_variable(
        lambda: tf.raw_ops.PlaceholderWithDefault(input=tf.zeros([0, *shape], dtype), shape=any_rows),
        f"{OF_RANKS}{name}",
        any_rows,
    )
    if is_building_graph():
        made.graph.get_collection_ref(_COLLECTION).append(made)
    return made


def _rows_of_this_rank(kept, counts):
    """Returns the values of variables after a restore: for each the restored row of this rank.

    If the number of ranks has changed, the value is the mean of the rows. Without rows, the value stays.

    Builds as few operators for a variable as possible, and no `tf.cond`: a `tf.function` traces them for each variable
    whose value differs between ranks, such as every sum of `Accumulate`.
    """
    ranks, counts = collective.current(), tf.stack(counts)
    are_of_others = tf.logical_and(counts > 1, tf.not_equal(counts, ranks.size))
    numbers = tf.where(are_of_others, 0, tf.clip_by_value(counts - 1, 0, ranks.rank))  # one row is this rank's own
    zero, one = tf.constant([0]), tf.constant([1])
    begins, ends = (tf.unstack(at[:, tf.newaxis], len(kept)) for at in (numbers, numbers + 1))
    values = []
    for (variable, row_variable), begin, end, is_of_others in zip(
        kept, begins, ends, tf.unstack(are_of_others, len(kept))
    ):
        rows = row_variable.read_value()
        found = tf.concat([_slice(rows, begin, end, one), tf.expand_dims(variable.read_value(), 0)], axis=0)
        own = _slice(found, zero, one, one, shrink_axis_mask=1)
        if rows.dtype.is_floating or rows.dtype == tf.bool:
            mean = tf.reduce_mean if rows.dtype.is_floating else tf.reduce_any
            own = tf.where(is_of_others, mean(rows, axis=0), own)
        values.append(own)
    return values


def _slice(tensor, begin, end, strides, **masks):
    return tf.raw_ops.StridedSlice(input=tensor, begin=begin, end=end, strides=strides, **masks)
