"""Starts all ranks from equal values: compares them once before the first step, and takes rank 0's where they differ.

Ranks average gradients, so they stay alike only if they start alike. This covers scripts that broadcast nothing, and
a restore on one rank. In a TF 1 graph nothing is added: a session's first run that reaches the all-reduces of
gradients first compares hashes, in runs of its own. A `tf.function` is compared while it is traced, before its first
step; eager steps are compared before their first update.
"""

from __future__ import annotations

import hashlib
import logging
import weakref
from collections.abc import Iterable, Sequence
from typing import Any, Callable

import numpy as np

from npu_bridge import collective
from npu_bridge.base import environment
from npu_bridge.base.errors import say_once
from npu_bridge.base.own_tensorflow import tf
from npu_bridge.base.terminal import logger
from npu_bridge.base.tf_internals import keras3
from npu_bridge.base.tf_internals.callers import builds_evaluation
from npu_bridge.base.tf_internals.sessions import run_without_engines
from npu_bridge.base.tf_internals.training import create_all_weights
from npu_bridge.collective import agreement, exchanges, first_run, wire_names
from npu_bridge.collective.apart import run_in_separate_graph
from npu_bridge.gradients import remote_slots, same_batches
from npu_bridge.gradients.graph_mode import building_graph
from npu_bridge.gradients.stage import Stage

_LOG = logger(__name__)
_SHOWN = 3
_IN_GRAPH = "session.run(broadcast_global_variables(0)) after the variables have their values"
_IN_FUNCTION = "NPUBroadcastGlobalVariablesCallback(0) to the callbacks, or hccl_ops.broadcast(variables, 0)"
_MEETING = "start_values"
_HELD_BYTES = 256 * 2**20


def make_plan(stages: Sequence[Stage], grads_and_vars: Sequence, has_numbered_names: bool) -> agreement.Plan:
    """Plans the collectives of stages for these gradients, which ranks compare before the first one."""
    plan = agreement.Plan(has_numbered_names=has_numbered_names)
    for stage in stages:
        plan.owner = stage.transfer_name or plan.owner
        plan.settings.update(stage.agreed_settings(grads_and_vars))
        if stage.communicates:
            plan.gradients = [_describe_gradient(grad, variable) for grad, variable in grads_and_vars]
            plan.fragments = stage.fragments(grads_and_vars)
    return plan


def _describe_gradient(grad, variable):
    """Describes the properties of one gradient that must be equal on all ranks."""
    shape = str(tuple(variable.shape.as_list())) if variable.shape.rank is not None else "unknown"
    if grad is None:
        return agreement.Gradient(variable.name, shape, "no gradient", "")
    kind = "a sparse gradient" if isinstance(grad, tf.IndexedSlices) else "a dense gradient"
    return agreement.Gradient(variable.name, shape, kind, grad.dtype.name)


def watch_graph(
    owner: str, variables: Callable[[], Iterable], transfers: Iterable[str], kept: Callable[[], Iterable] = list
) -> None:
    """Makes ranks compare variables before a session of the TF 1 graph being built first reduces gradients.

    Args:
      owner: the optimizer, for messages.
      variables: returns the variables; called only for the comparison.
      transfers: full names of the collectives that reduce gradients.
      kept: returns the variables whose values are each rank's own; see `_spread`.
    Raises:
      RanksDisagreeError: in that run, if ranks have variables of other shapes or dtypes.
    Graph: adds nothing.
    Ranks: collective in that run.
    """
    if environment.is_flag_on("HOROVOD_ELASTIC"):  # ranks that join later do not share the others' first step
        return
    check = first_run.find_or_add_check(tf.compat.v1.get_default_graph(), _GraphCheck, _GraphCheck)
    check.transfers.update(transfers)
    check.watched.append((owner, variables, kept))


def variables_in_training(model: Any, optimizer: Any = None) -> list:
    """Lists all values that a training resumes from, in the same order on every rank; creates the slots.

    Metrics are not part of it: each epoch resets them, and a rank that has loaded a model has made them already.

    Args:
      model: a Keras model, or a `tf.Module` that knows its variables.
      optimizer: a Keras optimizer; by default the one that the model was compiled with.
    Returns:
      Variables of TensorFlow, without duplicates and without those whose shape changes.
    """
    optimizer = model.optimizer if optimizer is None else optimizer
    if isinstance(optimizer, tf.keras.optimizers.legacy.Optimizer):
        create_all_weights(optimizer, model.trainable_variables)
    elif not getattr(optimizer, "built", False):
        optimizer.build(model.trainable_variables)
    own = optimizer.variables
    # Not `variables` of a Keras model, to which Keras 3 adds seeds: each rank draws its own random numbers.
    found = [*(model.weights if hasattr(model, "weights") else model.variables)]
    found += own() if callable(own) else own
    # Hyper-parameters and the loss scale of Keras' own optimizer are not in `variables`, but parts of the optimizer.
    found += [part for part in tf.train.TrackableView(optimizer).descendants() if isinstance(part, tf.Variable)]
    # Keras also lists tables of words (`StringLookup`, `TextVectorization`), which are not variables.
    found = [part for part in map(keras3.tensorflow_variable_of, found) if isinstance(part, tf.Variable)]
    # Rows of all ranks, which rank 0 may have restored, have other shapes there; the first step handles them.
    return list({id(variable): variable for variable in found if variable.shape.is_fully_defined()}.values())


class RankComparison:
    """Compares the all-reduces and the variables of one optimizer with those of the other ranks.

    Attributes:
      owner: name of the optimizer, for messages; "" until all-reduces were compared, and if there are none.
      has_compared: whether all-reduces were compared.
    """

    def __init__(self):
        self.owner = ""
        self.has_compared = False
        self._seen: set = set()

    def compare_plans(self, stages: Sequence[Stage], grads_and_vars: Sequence) -> None:
        """Compares what the stages are about to all-reduce.

        Raises:
          RanksDisagreeError: another rank is about to reduce something else.
        """
        # A graph is compared whenever gradients are computed. Some ranks trace a function, or run eager steps, more
        # often than others: there only the first time counts.
        is_graph = building_graph()
        if self.has_compared and not is_graph:
            return
        self.has_compared = True
        ranks = collective.current()
        plan = make_plan(stages if ranks.size > 1 else (), grads_and_vars, has_numbered_names=not is_graph)
        self.owner = plan.owner
        if plan.owner:
            agreement.process_agreements().check(plan, ranks.rank, ranks.size, training=wire_names.label())

    def compare_variables(self, variables: Iterable[Any], kept: Iterable[Any] = (), is_quiet: bool = False) -> None:
        """Compares the variables that were not compared before, outside of TF 1 graphs.

        Args:
          variables: the variables.
          kept: the variables whose values are each rank's own; see `_spread`.
          is_quiet: log no differences, because the script itself gives all ranks the values of one.
        Raises:
          RanksDisagreeError: ranks have variables of other shapes or dtypes.
        Ranks: collective.
        """
        new, new_kept = (
            [variable for variable in _comparable(given) if variable.ref() not in self._seen]
            for given in (variables, kept)
        )
        if not new or environment.is_flag_on("HOROVOD_ELASTIC") or builds_evaluation():
            return
        line = "" if is_quiet else _IN_FUNCTION
        self._seen.update(variable.ref() for variable in [*new, *new_kept])
        with tf.init_scope():
            if not tf.executing_eagerly() or not all(variable.is_initialized() for variable in new):
                if line:
                    say_once(logging.WARNING, f"{self.owner}: ranks may start from different values. Add {line}.")
                return
            _start_alike(self.owner, new, *_eagerly(new), line)
            _spread(new_kept, *_eagerly(new_kept))


class _GraphCheck(first_run.Check):
    """Compares the variables that the optimizers of one graph train.

    Attributes:
      watched: names of optimizers, with functions that return their variables and those that are each rank's own.
    """

    def __init__(self):
        super().__init__()
        self.watched: list[tuple[str, Callable, Callable]] = []
        self._done: weakref.WeakKeyDictionary = weakref.WeakKeyDictionary()
        self._has_looked = False

    def is_due(self, session):
        return len(self.watched) > self._done.get(session, 0)

    def make_check(self, session, run):
        new = self.watched[self._done.get(session, 0) :]
        slots = remote_slots.of_graph(session.graph)
        apart = set() if slots is None else {id(slot) for slot in slots.variables()}
        all_variables = _comparable(variable for _, give, _ in new for variable in give())
        variables = [variable for variable in all_variables if id(variable) not in apart]
        kept = _comparable(variable for _, _, give in new for variable in give())

        try:
            is_changed = _start_alike(new[0][0], variables, *_in_session(session, variables), _IN_GRAPH)
            _spread(kept, *_in_session(session, kept))
        except tf.errors.FailedPreconditionError:
            return None  # a variable has no value yet; the run itself will report it
        self._done[session] = len(self.watched)
        if is_changed and slots is not None:
            run_without_engines(session, targets=slots.distributions())
        has_looked, self._has_looked = self._has_looked, True
        return None if has_looked else same_batches.batch_of(run)

    def receive(self, fetched, fed):
        same_batches.compare([*fetched, *fed])


def _eagerly(variables):
    """Returns a function that reads variables by their positions, and one that writes them."""

    def write(positions, values):
        for position, value in zip(positions, values):
            variables[position].assign(value)

    return lambda positions: [variables[position].numpy() for position in positions], write


def _in_session(session, variables):
    """Returns the same two functions for variables of a TF 1 graph."""
    tensors = [session.graph.as_graph_element(variable) for variable in variables]

    def read(positions):
        return run_without_engines(session, [tensors[position] for position in positions])

    def write(positions, values):
        # Assigns as `Variable.load` does: it works in a finalized graph, and adds nothing to it.
        left = list(zip(positions, values))
        while left:
            targets, feeds, later = [], {}, []
            for position, value in left:
                # The initializer is a tensor where a variable of TensorFlow 1 starts from a checkpoint.
                initializer = getattr(variables[position].initializer, "op", variables[position].initializer)
                if initializer.inputs[1] in feeds:  # two variables that start from one tensor
                    later.append((position, value))
                else:
                    targets.append(initializer)
                    feeds[initializer.inputs[1]] = value
            run_without_engines(session, targets=targets, feeds=feeds)
            left = later

    return read, write


def _start_alike(owner, variables, read, write, line):
    """Gives every rank rank 0's values where they differ; returns whether any did.

    Args:
      read: takes a list of positions; returns the values of the variables there.
      write: takes a list of positions and their values.
      line: the code that a script would add to do this itself; "" where it does so already.
    """
    ranks = collective.current()
    # Reads many variables in one run: for every new set of fetches a session prunes the whole graph.
    hashes = [
        _hash(np.ascontiguousarray(value).tobytes())
        for batch in _batches(range(len(variables)), variables)
        for value in read(batch)
    ]
    kinds = [f"{variable.dtype.base_dtype.name}{variable.shape}" for variable in variables]
    whole = [len(kinds), _hash(";".join(kinds).encode()), _hash(str(hashes).encode())]
    of_ranks = exchanges.gather_values(whole, _MEETING)
    for rank, (count, of_kinds, _) in enumerate(of_ranks):
        if of_ranks[0][:2] != [count, of_kinds]:
            raise agreement.RanksDisagreeError(
                f"{owner}: rank {rank} and rank 0 train different variables. Expected the {of_ranks[0][0]} variables "
                f"of rank 0, slots included, in their shapes, dtypes and order; got {count}. Build the same model and "
                f"optimizer on every rank."
            )
    if len({of_values for *_, of_values in of_ranks}) == 1:
        return False
    hashes_of_ranks = zip(*exchanges.gather_values(hashes, _MEETING))
    differing = [position for position, column in enumerate(hashes_of_ranks) if len(set(column)) > 1]
    # Until now only rank 0 has rows for all ranks (`rank_values`), even if another rank restored them.
    names = [variables[position].name for position in differing if variables[position].shape.is_fully_defined()]
    if ranks.rank == 0 and names and line:
        more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
        _LOG.warning(
            "%s: the ranks started from different values of %s%s; now all have those of rank 0. To choose this "
            "yourself, add %s.",
            owner,
            ", ".join(names[:_SHOWN]),
            more,
            line,
        )
    for batch in _batches(differing, variables):
        values = read(batch)
        if not all(variables[position].shape.is_fully_defined() for position in batch):
            values = _shaped_as_on_rank_0(values)
        write(batch, _of_rank_0(ranks, values))
    return True


def _spread(variables, read, write):
    """Gives rank 0's own values to the ranks that hold nothing yet, for variables that each rank keeps for itself.

    A checkpoint of one rank has one value, which rank 0 alone may have read. Where there are rows for all ranks, each
    rank takes its own afterwards.
    """
    if not variables:
        return
    ranks = collective.current()
    held = [int(np.any(value)) for batch in _batches(range(len(variables)), variables) for value in read(batch)]
    of_ranks = zip(*exchanges.gather_values(held, _MEETING))
    missed = [position for position, column in enumerate(of_ranks) if column[0] and not all(column)]
    for batch in _batches(missed, variables):
        sent = [pair for pair in zip(batch, _of_rank_0(ranks, read(batch))) if not held[pair[0]]]
        write([position for position, _ in sent], [value for _, value in sent])


def _comparable(variables):
    """Returns the variables that can be compared and broadcast, without duplicates."""
    once = {id(variable): variable for variable in variables if isinstance(variable, tf.Variable)}.values()
    dtypes = [variable.dtype.base_dtype for variable in once]
    return [variable for variable, dtype in zip(once, dtypes) if dtype.is_floating or dtype.is_integer or dtype.is_bool]


def _hash(data):
    return int.from_bytes(hashlib.blake2b(data, digest_size=8).digest(), "big", signed=True)


def _batches(positions, variables):
    """Splits positions into batches whose values are held in memory together."""
    batch, held = [], 0
    for position in positions:
        size = (variables[position].shape.num_elements() or 0) * variables[position].dtype.base_dtype.size
        if batch and held + size > _HELD_BYTES:
            yield batch
            batch, held = [], 0
        batch.append(position)
        held += size
    if batch:
        yield batch


def _shaped_as_on_rank_0(values):
    """Replaces values by zeros where their shapes differ from rank 0's, which sends the values."""
    shapes = map(tuple, exchanges.gather_values([np.shape(value) for value in values], _MEETING)[0])
    return [value if np.shape(value) == shape else np.zeros(shape, value.dtype) for value, shape in zip(values, shapes)]


def _of_rank_0(ranks, values):
    return run_in_separate_graph(lambda *given: [ranks.broadcast(tensor, 0, _MEETING) for tensor in given], *values)
