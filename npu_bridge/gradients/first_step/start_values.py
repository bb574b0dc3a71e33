"""Starts all ranks from equal values: compares variables once before the first step, and sends rank 0's if they differ.

Ranks average gradients, so variables stay equal only if they start equal. This module covers scripts without a
broadcast, and a restore on one rank. In a TF 1 graph it adds no operators: before the first session run with
all-reduces of gradients, separate runs compare hashes. A `tf.function` is compared while it is traced, before its
first step. In eager execution variables are compared before the first update.
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
from npu_bridge.base.errors import listed, say_once
from npu_bridge.base.own_tensorflow import tf
from npu_bridge.base.terminal import logger
from npu_bridge.base.tf_internals import keras3
from npu_bridge.base.tf_internals.sessions import run_without_engines
from npu_bridge.collective.apart import run_in_separate_graph
from npu_bridge.collective.checks import agreement, first_run
from npu_bridge.collective.small_values import gather_values
from npu_bridge.gradients.checkpoints import remote_slots
from npu_bridge.gradients.first_step import same_batches
from npu_bridge.gradients.first_step.adapted_layers import renew_adapted_layers
from npu_bridge.gradients.keras.in_graphs import build_optimizer

_LOG = logger(__name__)
_IN_GRAPH = "session.run(broadcast_global_variables(0)) after the variables have their values"
_IN_FUNCTION = "NPUBroadcastGlobalVariablesCallback(0) to the callbacks, or hccl_ops.broadcast(variables, 0)"
_MEETING = "start_values"
_MAX_CHUNK_BYTES = 256 * 2**20


def compare_variables_before_first_run(
    owner: str,
    variables: Callable[[], Iterable],
    transfers: Iterable[str],
    variables_of_this_rank: Callable[[], Iterable] = list,
) -> None:
    """Makes ranks compare variables before the first session run that reduces gradients in the current TF 1 graph.

    Args:
      owner: name of the optimizer, for messages.
      variables: function that returns the variables; called only for the comparison.
      transfers: full names of the collectives that reduce gradients.
      variables_of_this_rank: function that returns the variables whose values differ between ranks; see
        `_copy_to_ranks_without_values`.
    Raises:
      RanksDisagreeError: in that session run, if shapes or dtypes of variables differ between ranks.
    Graph: adds nothing.
    Ranks: collective in that session run.
    """
    if environment.is_flag_on("HOROVOD_ELASTIC"):  # ranks that join later have missed the first step of other ranks
        return
    check = first_run.find_or_add_check(tf.compat.v1.get_default_graph(), _StartValuesCheck, _StartValuesCheck)
    check.transfers.update(transfers)
    check.watched.append((owner, variables, variables_of_this_rank))


def variables_in_training(model: Any, optimizer: Any = None) -> list:
    """Lists the variables from which a training resumes, in the same order on every rank; creates missing slots.

    The list has no variables of metrics: each epoch resets metrics, and only ranks that loaded a model have them.

    Args:
      model: a Keras model, or a `tf.Module` that tracks its variables.
      optimizer: a Keras optimizer; by default the optimizer of the compiled model.
    Returns:
      TensorFlow variables, without duplicates and without variables whose shape can change.
    """
    # Variables with rows for all ranks can have another shape on rank 0, after a restore; the first step handles them.
    return [variable for variable in _variables_and_rows(model, optimizer) if variable.shape.is_fully_defined()]


def send_restored_state(model: Any, optimizer: Any = None) -> None:
    """Sends the state that rank 0 has restored to all ranks, rows for all ranks included; works only eagerly.

    So a training can be restored at any time: the start values are compared only once.

    Args:
      model, optimizer: as in `variables_in_training`.
    Raises:
      RanksDisagreeError: the ranks do not have the same variables.
    Ranks: collective.
    """
    if collective.current().size > 1:
        variables = comparable_variables(_variables_and_rows(model, optimizer))
        _broadcast_differing("restore", variables, *_eager_reader_and_writer(variables), "")
    renew_adapted_layers(model)


def _variables_and_rows(model, optimizer):
    optimizer = model.optimizer if optimizer is None else optimizer
    build_optimizer(optimizer, model.trainable_variables)
    own = optimizer.variables
    # Not `variables` of a Keras model, to which Keras 3 adds seeds: each rank draws its own random numbers.
    found = [*(model.weights if hasattr(model, "weights") else model.variables)]
    found += own() if callable(own) else own
    # Hyper-parameters and the loss scale of Keras optimizers are not in `variables`, but are parts of the optimizer.
    found += [part for part in tf.train.TrackableView(optimizer).descendants() if isinstance(part, tf.Variable)]
    # Keras also lists tables of words (`StringLookup`, `TextVectorization`), which are not variables.
    found = [part for part in map(keras3.tensorflow_variable_of, found) if isinstance(part, tf.Variable)]
    return list({id(variable): variable for variable in found}.values())


def compare_variables(owner: str, variables: Sequence, kept_variables: Sequence, is_quiet: bool = False) -> None:
    """Compares variables between ranks, in functions and eager execution.

    Args:
      owner: name of the optimizer, for messages.
      variables: the variables, a result of `comparable_variables`.
      kept_variables: variables that differ between ranks by design; only `_copy_to_ranks_without_values` uses them.
      is_quiet: log no differences, because the script itself broadcasts the values of one rank.
    Raises:
      RanksDisagreeError: shapes or dtypes of variables differ between ranks.
    Ranks: collective.
    """
    line = "" if is_quiet else _IN_FUNCTION
    with tf.init_scope():
        if not tf.executing_eagerly() or not all(variable.is_initialized() for variable in variables):
            if line and collective.current().rank == 0:
                # A script can have broadcast the empty list of a model without weights.
                built = "Begin the model with an Input or call model.build(shape). Then add"
                say_once(logging.WARNING, f"{owner}: ranks can start from different values. {built} {line}.")
            return
        _broadcast_differing(owner, variables, *_eager_reader_and_writer(variables), line)
        _copy_to_ranks_without_values(kept_variables, *_eager_reader_and_writer(kept_variables))


class _StartValuesCheck(first_run.FirstRunCheck):
    """A check of session runs that compares between ranks the variables that the optimizers of one graph train.

    Attributes:
      watched: for each optimizer its name, a function that returns its variables, and a function that returns the
        variables whose values differ between ranks.
    """

    def __init__(self):
        super().__init__()
        self.watched: list[tuple[str, Callable, Callable]] = []
        self._done: weakref.WeakKeyDictionary = weakref.WeakKeyDictionary()
        self._has_chosen_batch = False

    def is_due(self, session):
        return len(self.watched) > self._done.get(session, 0)

    def make_check(self, session, run):
        new = self.watched[self._done.get(session, 0) :]
        slots = remote_slots.find_remote_slots(session.graph)
        apart = set() if slots is None else {id(slot) for slot in slots.variables()}
        all_variables = comparable_variables(variable for _, give, _ in new for variable in give())
        variables = [variable for variable in all_variables if id(variable) not in apart]
        kept = comparable_variables(variable for _, _, give in new for variable in give())

        try:
            is_changed = _broadcast_differing(
                new[0][0], variables, *_session_reader_and_writer(session, variables), _IN_GRAPH
            )
            _copy_to_ranks_without_values(kept, *_session_reader_and_writer(session, kept))
        except tf.errors.FailedPreconditionError:
            return None  # a variable is uninitialised; the training run raises the error
        self._done[session] = len(self.watched)
        if is_changed and slots is not None:
            run_without_engines(session, targets=slots.distribution_ops())
        has_chosen_batch, self._has_chosen_batch = self._has_chosen_batch, True
        return None if has_chosen_batch else same_batches.list_batch_tensors(run)

    def receive(self, fetched, fed):
        same_batches.compare_first_batches([*fetched, *fed])


def _eager_reader_and_writer(variables):
    """Returns two functions for variables in eager execution: to read and to write variables by position."""

    def write(positions, values):
        for position, value in zip(positions, values):
            variables[position].assign(value)

    return lambda positions: [variables[position].numpy() for position in positions], write


def _session_reader_and_writer(session, variables):
    """Returns two functions for variables of a TF 1 graph: to read and to write variables by position."""
    tensors = [session.graph.as_graph_element(variable) for variable in variables]

    def read(positions):
        return run_without_engines(session, [tensors[position] for position in positions])

    def write(positions, values):
        # Assigns as `Variable.load` does, which works in a finalized graph and adds no operators.
        left = list(zip(positions, values))
        while left:
            targets, feeds, later = [], {}, []
            for position, value in left:
                # The initializer is a tensor if a variable of TensorFlow 1 starts from a checkpoint.
                initializer = getattr(variables[position].initializer, "op", variables[position].initializer)
                if initializer.inputs[1] in feeds:  # two variables that start from one tensor
                    later.append((position, value))
                else:
                    targets.append(initializer)
                    feeds[initializer.inputs[1]] = value
            run_without_engines(session, targets=targets, feeds=feeds)
            left = later

    return read, write


def _broadcast_differing(owner, variables, read, write, broadcast_code):
    """Broadcasts from rank 0 the variables that differ between ranks; returns whether there were any.

    Args:
      owner: name of the optimizer, for messages.
      variables: the variables to compare.
      read: function of a list of positions; returns the values of these variables.
      write: function of a list of positions and a list of values; assigns the values.
      broadcast_code: the code to add to a script that does not broadcast, for the warning; "" for no warning.
    """
    ranks = collective.current()
    # Reads many variables in one run: for every new set of fetches a session prunes the whole graph.
    hashes = [
        _hash_as_int64(np.ascontiguousarray(value).view(np.uint8))
        for chunk in _split_by_memory(range(len(variables)), variables)
        for value in read(chunk)
    ]
    kinds = [f"{variable.dtype.base_dtype.name}{variable.shape}" for variable in variables]
    whole = [len(kinds), _hash_as_int64(";".join(kinds).encode()), _hash_as_int64(str(hashes).encode())]
    of_ranks = gather_values(whole, _MEETING)
    for rank, (count, of_kinds, _) in enumerate(of_ranks):
        if of_ranks[0][:2] != [count, of_kinds]:
            raise agreement.RanksDisagreeError(
                f"{owner}: rank {rank} and rank 0 train different variables. Expected the {of_ranks[0][0]} variables "
                f"of rank 0, slots included, in their shapes, dtypes and order; got {count} other variables. "
                f"Build the same model and optimizer on every rank."
            )
    if len({of_values for *_, of_values in of_ranks}) == 1:
        return False
    hashes_of_ranks = zip(*gather_values(hashes, _MEETING))
    differing = [position for position, column in enumerate(hashes_of_ranks) if len(set(column)) > 1]
    # Variables with rows for all ranks (`rank_values`) are not named in the warning: they differ by design.
    names = [variables[position].name for position in differing if variables[position].shape.is_fully_defined()]
    if ranks.rank == 0 and names and broadcast_code:
        _LOG.warning(
            "%s: the ranks started from different values of %s; now all ranks have the values of rank 0. To "
            "broadcast yourself, add %s.",
            owner,
            listed(names),
            broadcast_code,
        )
    for chunk in _split_by_memory(differing, variables):
        values = read(chunk)
        if not all(variables[position].shape.is_fully_defined() for position in chunk):
            values = _zeros_where_shapes_differ(values)
        write(chunk, _broadcast_values(ranks, values))
    return True


def broadcast_variables(variables: Sequence[tf.Variable], root_rank: int) -> None:
    """Gives variables their values on `root_rank`, many at once; ranks have them in equal shapes. Eager; collective."""
    for chunk in _split_by_memory(range(len(variables)), variables):
        values = [variables[position].numpy() for position in chunk]
        for position, value in zip(chunk, _broadcast_values(collective.current(), values, root_rank)):
            variables[position].assign(value)


def _copy_to_ranks_without_values(variables, read, write):
    """Copies values of rank 0 to ranks where variables are still zero; for variables meant to differ between ranks.

    A checkpoint of one rank contains only one value, and rank 0 can be the only rank that restored the value. If a
    checkpoint has a row for each rank, each rank sets its variables to its own row afterwards.
    """
    if not variables:
        return
    ranks = collective.current()
    held = [int(np.any(value)) for chunk in _split_by_memory(range(len(variables)), variables) for value in read(chunk)]
    of_ranks = zip(*gather_values(held, _MEETING))
    missed = [position for position, column in enumerate(of_ranks) if column[0] and not all(column)]
    for chunk in _split_by_memory(missed, variables):
        sent = [pair for pair in zip(chunk, _broadcast_values(ranks, read(chunk))) if not held[pair[0]]]
        write([position for position, _ in sent], [value for _, value in sent])


def comparable_variables(variables: Iterable) -> list:
    """Returns the variables that can be compared and broadcast, without duplicates."""
    once = {id(variable): variable for variable in variables if isinstance(variable, tf.Variable)}.values()
    dtypes = [variable.dtype.base_dtype for variable in once]
    return [variable for variable, dtype in zip(once, dtypes) if dtype.is_floating or dtype.is_integer or dtype.is_bool]


def _hash_as_int64(data):
    return int.from_bytes(hashlib.blake2b(data, digest_size=8).digest(), "big", signed=True)


def _split_by_memory(positions, variables):
    """Splits positions into chunks, limited by the bytes of their values in memory."""
    chunk, held = [], 0
    for position in positions:
        size = (variables[position].shape.num_elements() or 0) * variables[position].dtype.base_dtype.size
        if chunk and held + size > _MAX_CHUNK_BYTES:
            yield chunk
            chunk, held = [], 0
        chunk.append(position)
        held += size
    if chunk:
        yield chunk


def _zeros_where_shapes_differ(values):
    """Replaces values whose shapes differ from rank 0 by zeros of rank 0's shape, to receive rank 0's values."""
    shapes = map(tuple, gather_values([np.shape(value) for value in values], _MEETING)[0])
    return [value if np.shape(value) == shape else np.zeros(shape, value.dtype) for value, shape in zip(values, shapes)]


def _broadcast_values(communicator, values, root_rank=0):
    def broadcast(*given):
        return [communicator.broadcast(tensor, root_rank, _MEETING) for tensor in given]

    return run_in_separate_graph(broadcast, *values)
