"""Implements `TensorFlowCommunicator`: collective operations between several ranks, by TensorFlow's own operators.

TensorFlow matches collectives by numbers. Ranks can build graphs in any order, so the number of a collective is a hash
of its name, operator, dtype and shape. All collectives of one number must have one shape. So a tensor whose shape is
known only at run time is padded to one of a few sizes, and the size becomes part of the number. Broadcasts need no
padding: their numbers always have the exact size, because perhaps one rank alone knows the shape before the run.
Collectives of different numbers can start in any order on each rank.
"""

from __future__ import annotations

import functools
import hashlib
import json
import threading
from typing import Any, Callable

import tensorflow as tf

from npu_bridge.base import environment
from npu_bridge.base.session_wrapper import SessionEngine, add_engine
from npu_bridge.base.tf_internals.sessions import read_content, run_options_buffer
from npu_bridge.collective import wire_names
from npu_bridge.collective.checks.first_run import collectives_in
from npu_bridge.collective.engines import tensorflow_server
from npu_bridge.collective.engines.communicator import SeveralRanks
from npu_bridge.collective.engines.transfer_tensors import element_count, move_as_bits, prevent_op_merging
from npu_bridge.collective.rendezvous import barrier
from npu_bridge.collective.rendezvous.key_value_store import KeyValueStore
from npu_bridge.collective.wire_names import name_collective
from npu_bridge.graph.run import run_of, run_of_call

_REDUCTIONS = {"sum": "Add", "max": "Max", "min": "Min", "prod": "Mul"}
# The dtypes that the operators cannot sum, and wider ones. Nor can the operators copy one-byte integers.
_WIDER = {tf.int8: tf.int32, tf.uint8: tf.int32, tf.bool: tf.int32, tf.uint32: tf.int64, tf.uint64: tf.int64}
_SAME_BITS = {
    tf.bfloat16: tf.float16,
    tf.int16: tf.float16,
    tf.uint16: tf.float16,
    tf.uint32: tf.int32,
    tf.uint64: tf.int64,
    tf.complex64: tf.int64,
    tf.complex128: tf.int64,
}
# Numbers of elements to which tensors are padded: four for each power of two, so padding adds a fifth at most.
_SIZES = sorted({round(2 ** (quarter / 4)) for quarter in range(4 * 31)})
_POLL_SECS = 1.0
_KEYS: dict[int, str] = {}  # the name of the collective with each number, in this process
_OF_KEY: dict[int, TensorFlowCommunicator] = {}  # the ranks of each group
_OPENED: set[tuple[int, ...]] = set()  # the members of all groups of the job
_OF_GROUPS: set[str] = set()  # full names of collectives of groups in graphs
_CALLED_BEFORE_COLLECTIVES: list[Callable[[Any], Any]] = []


class TensorFlowCommunicator(SeveralRanks):
    """The ranks of an `npu-run` job on one machine; each rank is a TensorFlow server.

    Raises:
      NoServerError: this process cannot be a TensorFlow server.
    """

    runs_can_differ = False  # TensorFlow numbers runs; a collective connects runs of one number

    def __init__(self):
        tensorflow_server.server_of_process().start()
        _add_run_counter_and_gradient()
        place = environment.launcher_placement()
        self.rank, self.size = place.rank, place.size
        self.local_rank, self.local_size = place.local_rank, place.local_size
        self.members = tuple(range(self.size))

    def _sum_vector(self, vector, name, average):
        total = self._reduce_padded(vector, "sum", name)
        if not average:
            return total
        return total * tf.cast(1 / self.size, total.dtype) if total.dtype.is_floating else total // self.size

    def _wide_dtype(self, dtype):
        return _WIDER.get(dtype, super()._wide_dtype(dtype))

    def reduce(self, tensor, reduction, name):
        wide = tf.cast(tensor, self._wide_dtype(tensor.dtype))
        return tf.cast(self._reduce_padded(wide, reduction, name), tensor.dtype)

    def reduce_scatter(self, tensor, reduction, name):
        return tf.split(self.reduce(tensor, reduction, name), self.size)[self.rank]

    def all_gather(self, tensor, name):
        def gather(part):
            rows, row_shape = tf.shape(part)[:1], tf.shape(part)[1:]
            counts = self._gather_vectors(rows, f"{name}_counts", None)
            lengths = counts * tf.reduce_prod(row_shape)
            size, number = _choose_padded_size(tf.reduce_max(lengths))
            whole = self._gather_vectors(_pad_vector(part, size), name, number)
            blocks = tf.reshape(whole, [self.size, size])
            return self._join_blocks(blocks, lengths, tf.reduce_sum(counts), part)

        return _copy_any_dtype(tf.convert_to_tensor(tensor), gather, is_marked=True)

    def _broadcast_numbers(self, tensor, root_rank, name):
        def send(value):
            vector, count = tf.reshape(value, [-1]), element_count(value)
            size = max(count, 1) if isinstance(count, int) else tf.maximum(count, 1)
            if size is not count:  # at least one element: empty tensors of some dtypes crash (TensorFlow 2.15)
                vector = _pad_vector(vector, size)
            operator = "CollectiveBcastSendV2" if self.rank == root_rank else "CollectiveBcastRecvV2"
            sent = self._add_collective(operator, name, vector, size, root_rank)
            whole = sent if size is count else sent[:count]
            return tf.ensure_shape(tf.reshape(whole, tf.shape(value)), value.shape)

        return _copy_any_dtype(tensor, send)

    def all_to_all(self, tensor, counts, name):
        counts = tf.cast(counts, tf.int32)
        arriving = []

        def send(blocks):
            matrix = tf.reshape(self._gather_vectors(counts, f"{name}_counts", None), [self.size, self.size])
            arriving.append(matrix[:, self.rank])
            row = tf.reduce_prod(tf.shape(blocks)[1:])
            size, number = _choose_padded_size(tf.reduce_max(matrix) * row)
            own = tf.split(tf.reshape(blocks, [-1]), counts * row, num=self.size)
            sent = tf.stack([_pad_vector(block, size) for block in own])
            received = self._add_collective("CollectiveAllToAllV2", name, sent, number)
            return self._join_blocks(received, arriving[0] * row, tf.reduce_sum(arriving[0]), blocks)

        return _copy_any_dtype(tensor, send), arriving[0]

    def exchange_integers(self, numbers, exchange_name, group_text="its group"):
        store, is_over = KeyValueStore(f"{exchange_name}_numbers"), threading.Event()

        def gather():
            store.put(self.rank, json.dumps([int(number) for number in numbers]))
            while not is_over.is_set() and store.wait(self.size, _POLL_SECS):
                pass
            return [json.loads(store.get(rank) or "[]") for rank in range(self.size)]

        return barrier.run_barrier(gather, exchange_name, self.rank, self.size, is_over.set, group_text)

    def open_groups(self, groups, exchange_name):
        _OPENED.update(map(tuple, groups))
        return [_RankGroup(self.rank, members) for members in groups]

    def _reduce_padded(self, tensor, reduction, name):
        (vector, number), shape = _pad_to_size(tensor), tf.shape(tensor)
        total = self._add_collective("CollectiveReduceV2", name, vector, number, _REDUCTIONS[reduction])
        return _remove_padding(total, tensor, shape)

    def _gather_vectors(self, vector, name, size_number):
        return self._add_collective("CollectiveGatherV2", name, vector, size_number)

    def _join_blocks(self, blocks, block_lengths, row_count, reference):
        """Joins all ranks' blocks, without padding, to `row_count` rows with the row shape of `reference`."""
        joined = tf.concat([blocks[rank, : block_lengths[rank]] for rank in range(self.size)], axis=0)
        shaped = tf.reshape(joined, tf.concat([[row_count], tf.shape(reference)[1:]], axis=0))
        return tf.ensure_shape(shaped, tf.TensorShape([None]).concatenate(reference.shape[1:]))

    def _add_collective(self, operator, name, tensor, size_number, reduction_or_root=None):
        """Adds a collective operator with the same name and numbers on every rank, and returns the operator's result.

        Args:
          size_number: number for the size of `tensor`, a vector; None if all ranks have the same static shape.
          reduction_or_root: the reduction of a reduce, or the root of a broadcast.
        """
        with wire_names.record_collective_names() as full_names, name_collective(name) as named:
            shape = tensor.shape if size_number is None else "any"
            group_key = _hash_to_number("group", self.members)
            _OF_KEY[group_key] = self
            key = _hash_to_number(
                operator.replace("Send", "").replace("Recv", ""), named["name"], tensor.dtype, shape, reduction_or_root
            )
            common = {
                "group_size": self.size,
                "group_key": group_key,
                "instance_key": _add_size(key, size_number),
                "name": named["name"],
            }
            if operator == "CollectiveReduceV2":
                common.update(merge_op=reduction_or_root, final_op="Id")
            if "Bcast" not in operator:
                common.update(ordering_token=[])
                for note in _CALLED_BEFORE_COLLECTIVES:
                    note(tensor)
            if operator == "CollectiveBcastRecvV2":
                result = tf.raw_ops.CollectiveBcastRecvV2(shape=tf.shape(tensor), T=tensor.dtype, **common)
            else:
                result = getattr(tf.raw_ops, operator)(input=tensor, **common)
        _OF_GROUPS.update(full_names if self.members in _OPENED else ())
        return prevent_op_merging(result)


class _RankGroup(TensorFlowCommunicator):
    """A group of some of the ranks of a job; `rank` is None in a process that is not a member."""

    def __init__(self, world_rank, members):
        self.members = tuple(members)
        self.size = len(members)
        self.rank = self.members.index(world_rank) if world_rank in members else None


class _RunCounter(SessionEngine):
    """A session engine that makes TensorFlow count runs separately for each set of collectives.

    So ranks can run their sessions in different orders.
    """

    def execute(self, session, request):
        options = tf.compat.v1.RunOptions()
        if request.options is not None:
            options.ParseFromString(read_content(request.options))
        key = None
        if not options.experimental.collective_graph_key:
            key = _run_key(session.graph, lambda: run_of(session.graph, request.requested_elements, request.fed))
        if key is None:
            return self.inner.execute(session, request)
        options.experimental.collective_graph_key = key
        with run_options_buffer(options) as buffer:
            return self.inner.execute(session, request._replace(options=buffer))

    def prepare_call(self, session, callable_options):
        key = _run_key(session.graph, lambda: run_of_call(session.graph, callable_options))
        if key is not None:
            callable_options.run_options.experimental.collective_graph_key = key
        return self.inner.prepare_call(session, callable_options)


def call_before_collectives(callback: Callable[[Any], Any]) -> None:
    """Calls `callback` with the tensor of each new collective that combines values of ranks, from now on."""
    _CALLED_BEFORE_COLLECTIVES.append(callback)


@functools.cache
def _add_run_counter_and_gradient():
    """Prepares sessions, and defines the gradient of sums, which TensorFlow lacks."""
    add_engine(None, _RunCounter())

    @tf.RegisterGradient("CollectiveReduceV2")
    def gradient(op, upstream):
        ranks = _OF_KEY.get(tf.get_static_value(op.inputs[2]).item())
        if ranks is None or op.get_attr("merge_op") != b"Add":
            raise LookupError(
                f"{op.type} has no gradient. Expected a sum over ranks; got {op.get_attr('merge_op')}. Put "
                f"tf.stop_gradient around its result."
            )
        name = f"gradient_of_{tf.get_static_value(op.inputs[3])}"
        return [ranks.reduce(upstream, "sum", name), None, None, None]


def _run_key(graph, find_run):
    """Returns a number for a run, equal on all ranks that take part in its collectives; None without collectives.

    Ranks whose groups overlap, directly or through other groups, must run collectives of groups equally often.
    """
    transfers = collectives_in(find_run()) if wire_names.names_in_graph(graph) else set()
    of_job = transfers - _OF_GROUPS
    if of_job:
        key = _hash_to_number("run", *sorted(of_job))
        _synchronise_run_numbers(key)
        return key
    if not transfers:
        return None
    connected = {environment.launcher_placement().rank}
    for _ in _OPENED:
        connected.update(*(members for members in _OPENED if not connected.isdisjoint(members)))
    return _hash_to_number("run of groups", *sorted(connected))


@functools.cache
def _synchronise_run_numbers(key):
    """Makes all ranks fetch the number of their next session run with `key`, before any rank begins a later run.

    Rank 0 keeps this number and adds 1 at each of its runs, even if the run executes no collective.
    """
    with wire_names.use_label(""), tf.Graph().as_default() as graph:
        met = TensorFlowCommunicator().reduce(tf.zeros([]), "sum", f"steps_of_{key}")
        options = tf.compat.v1.RunOptions()
        options.experimental.collective_graph_key = key
        with tf.compat.v1.Session(graph=graph) as session:
            session.run(met, options=options)


def _hash_to_number(*parts):
    """Returns a positive 31-bit hash of texts and numbers, the same on all ranks."""
    text = "|".join(map(str, parts))
    return _claim_number(int.from_bytes(hashlib.sha256(text.encode()).digest()[:4], "big") >> 1 or 1, text)


def _add_size(key, size_number):
    """Returns the number of a collective that has the hash `key` and tensors of a size; None stands for any size."""
    if isinstance(size_number, int):
        return _claim_number(key ^ size_number, f"{_KEYS[key]}|{size_number}")
    return key if size_number is None else tf.bitwise.bitwise_xor(key, size_number)


def _claim_number(key, text):
    """Returns `key`; raises RuntimeError if another collective has this number."""
    if _KEYS.setdefault(key, text) != text:
        raise RuntimeError(
            f"npu_bridge.collective: two collectives have the same number. Expected a number for each collective; "
            f"got {key} for {_KEYS[key]} and for {text}. Rename the optimizer, or the object that owns the collectives."
        )
    return key


def _copy_any_dtype(tensor, copy_elements, is_marked=False):
    """Applies `copy_elements`, a function that only copies elements, to a tensor of any numeric dtype."""
    if tensor.dtype in _WIDER and tensor.dtype.size == 1:
        return tf.cast(copy_elements(tf.cast(tensor, _WIDER[tensor.dtype])), tensor.dtype)
    return move_as_bits(tensor, copy_elements, is_marked, _SAME_BITS)


def _pad_to_size(tensor):
    """Returns a tensor padded to a size of `_SIZES`, and the size's index; with a static shape, the tensor and None."""
    if tensor.shape.is_fully_defined():
        return tensor, None
    size, number = _choose_padded_size(tf.size(tensor))
    return _pad_vector(tensor, size), number


def _remove_padding(result, tensor, shape):
    """Returns the result of a collective on `_pad_to_size(tensor)`, in the shape of `tensor`."""
    if tensor.shape.is_fully_defined():
        return result
    return tf.ensure_shape(tf.reshape(result[: tf.reduce_prod(shape)], shape), tensor.shape)


def _choose_padded_size(count):
    """Returns the smallest of `_SIZES` for a number of elements, and the size's position."""
    position = tf.searchsorted(_SIZES, tf.reshape(count, [1]))[0]
    return tf.gather(_SIZES, position), position


def _pad_vector(tensor, size):
    """Returns the elements of a tensor as a vector, padded with zeros to a size."""
    vector = tf.reshape(tensor, [-1])
    return tf.pad(vector, [[0, size - tf.size(vector)]])
