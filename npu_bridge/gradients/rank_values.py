"""Saves and restores the values that stages keep on each rank, such as error feedback, in rank 0's checkpoint.

Gradients that a rank did not send, or the sums of its window, differ from rank to rank. So rank 0 has a second variable
for each of them, with a row for every rank: `gather` fills it for a checkpoint. If there are rows before a step, each
rank takes its own row, bit for bit, and the variable is emptied. So it does not matter how the variable was restored,
or whether the same training continues. With another number of ranks, all take the mean (`kept_state` has the table).
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import Any

from npu_bridge import collective
from npu_bridge.base.own_tensorflow import tf
from npu_bridge.base.tf_internals.graphs import is_compiled_by_xla
from npu_bridge.base.tf_internals.sessions import run_without_engines
from npu_bridge.collective import first_run, wire_names
from npu_bridge.collective.packing import pack, unpack
from npu_bridge.collective.transfer_tensors import prevent_pruning
from npu_bridge.gradients.graph_mode import building_graph, run_if, state_variable
from npu_bridge.gradients.kept_state import OF_RANKS

_KEY = ("npu_bridge", "of_ranks")  # TensorFlow exports collections with text keys only


def without_rows(variables: Sequence[tf.Variable]) -> list:
    """Returns the variables of the graph being built that can be broadcast.

    Variables with rows have another shape on rank 0; they are sent before the first step (`start_values`).
    """
    rows = {variable.ref() for variable in tf.compat.v1.get_default_graph().get_collection_ref(_KEY)}
    return [variable for variable in variables if variable.ref() not in rows]


class RankValues:
    """The values of all ranks for variables that differ between ranks.

    Attributes:
      module: holds the variables with the rows, for checkpoints; these are empty except around a checkpoint.
    """

    def __init__(self):
        self.module = tf.Module(name="of_ranks")
        self._kept: dict = {}

    @property
    def kept(self) -> list:
        """The variables that differ between ranks."""
        return [variable for variable, _ in self._kept.values()]

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
            return run_if(tf.reduce_any(tf.stack(self._counts()) > 0), self._take)

    def gather(self, name: str, is_kept: bool = False) -> Any:
        """Fills the rows on rank 0 by a transfer of this name; returns the op to run, None when executed eagerly.

        With `is_kept` other ranks keep a row, their own, so that `take` gives them back what they have now.

        Ranks: collective.
        """
        ranks, kept = collective.current(), list(self._kept.values())
        if ranks.size == 1 or not kept:
            return None if tf.executing_eagerly() else tf.no_op()
        values = [tf.identity(variable.read_value()) for variable, _ in kept]
        words = pack(values)
        received, _ = ranks.all_to_all(words, tf.stack([tf.size(words), *[0] * (ranks.size - 1)]), name)
        if ranks.rank > 0 and not is_kept:
            return prevent_pruning(received)
        if ranks.rank > 0:
            with tf.control_dependencies([] if tf.executing_eagerly() else [prevent_pruning(received)]):
                filled = [rows.assign(value[tf.newaxis]) for (_, rows), value in zip(kept, values)]
        else:
            specs = [tf.TensorSpec(variable.shape, variable.dtype.base_dtype) for variable, _ in kept]
            values_of_ranks = unpack(received, [specs] * ranks.size)
            filled = [rows.assign(tf.stack(each)) for (_, rows), each in zip(kept, zip(*values_of_ranks))]
        return None if tf.executing_eagerly() else tf.group(*filled)

    def counts(self) -> dict[str, int]:
        """Returns how many rows each variable has now, by its name; only eagerly."""
        return {variable.name: int(count) for (variable, _), count in zip(self._kept.values(), self._counts())}

    def _counts(self):
        return [tf.raw_ops.VariableShape(input=rows.handle)[0] for _, rows in self._kept.values()]

    def _take(self):
        taken = [variable.assign(_own_row(variable, rows.read_value())) for variable, rows in self._kept.values()]
        with tf.control_dependencies([] if tf.executing_eagerly() else taken):
            empty = [
                rows.assign(tf.zeros([0, *variable.shape.as_list()], rows.dtype))
                for variable, rows in self._kept.values()
            ]
        return None if tf.executing_eagerly() else tf.group(*empty)


class GivenBack(first_run.Check):
    """Gives each rank its values back between two runs of a session, before a training run that needs them.

    A training step of a TF 1 graph reads weights before anything of this package runs in it. So rows are taken in a run
    of its own, before the first training run of a session and the first one after rows were filled or restored.

    Args:
      values: the rank values, all made; of the graph being built.
      transfers: full names of transfers of training runs.
    Attributes:
      done_in: the sessions whose values are each rank's own again.
      filling: the check of runs that fill the rows.
    """

    def __init__(self, values: RankValues, transfers: set[str]):
        super().__init__(transfers)
        self.done_in: weakref.WeakSet = weakref.WeakSet()
        self.filling = _Filling(self)
        graph = tf.compat.v1.get_default_graph()
        for check in (self, self.filling):
            first_run.find_or_add_check(graph, check, lambda check=check: check)
        with tf.init_scope():
            self._take = tf.group(values.take())
        _GIVEN_BACK.setdefault(graph, []).append(self)

    def is_due(self, session):
        return session not in self.done_in

    def make_check(self, session, run):
        try:
            run_without_engines(session, targets=[self._take])
        except tf.errors.FailedPreconditionError:
            return  # a variable has no value yet, which the run itself will say
        self.done_in.add(session)


class _Filling(first_run.Check):
    """Makes a session look for rows again after a run that fills them."""

    def __init__(self, given_back):
        super().__init__()
        self._given_back = given_back

    def is_due(self, session):
        return session in self._given_back.done_in

    def make_check(self, session, run):
        self._given_back.done_in.discard(session)


_GIVEN_BACK: weakref.WeakKeyDictionary[tf.Graph, list[GivenBack]] = weakref.WeakKeyDictionary()


def rows_may_have_come(graph: tf.Graph | None, session: Any) -> None:
    """Notes that a session has restored variables, of which some may be rows."""
    for given_back in _GIVEN_BACK.get(graph, ()) if graph is not None else ():
        given_back.done_in.discard(session)


def noted_gather(values: RankValues, name: str, given_back: GivenBack | None) -> Any:
    """Works as `RankValues.gather`, and lets `given_back`, or else the next step, give the values back."""
    with wire_names.recorded_names() as transfers:
        op = values.gather(name, is_kept=True)
    if given_back is not None:
        given_back.filling.transfers.update(transfers)
    return op


def _empty_rows(variable):
    shape, dtype = variable.shape, variable.dtype.base_dtype
    any_rows = tf.TensorShape([None, *shape])
    # The initial value can have rows, too: feeding it sets the variables of a finished graph.
    made = state_variable(
        lambda: tf.raw_ops.PlaceholderWithDefault(input=tf.zeros([0, *shape], dtype), shape=any_rows),
        f"{OF_RANKS}{variable.name.partition(':')[0]}",
        any_rows,
    )
    if building_graph():
        made.graph.get_collection_ref(_KEY).append(made)
    return made


def _own_row(variable, rows):
    """Returns this rank's row, the mean of the rows of another number of ranks, or the variable if there are no rows.

    Uses no condition for each variable, which would slow down building; computed around checkpoints only.
    """
    ranks, count = collective.current(), tf.shape(rows)[0]
    is_of_others = tf.logical_and(count > 1, tf.not_equal(count, ranks.size))
    number = tf.where(is_of_others, 0, tf.clip_by_value(count - 1, 0, ranks.rank))  # one row is this rank's own
    own = tf.concat([rows[number : number + 1], variable.read_value()[tf.newaxis]], axis=0)[0]
    if rows.dtype.is_floating or rows.dtype == tf.bool:
        mean = tf.reduce_mean if rows.dtype.is_floating else tf.reduce_any
        own = tf.where(is_of_others, mean(rows, axis=0), own)
    return own
