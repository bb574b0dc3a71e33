"""Implements `HorovodCommunicator`: collective operations between several ranks, by Horovod."""

from __future__ import annotations

import platform
from typing import Callable

import numpy as np
import tensorflow as tf

from npu_bridge.base import environment, horovod_internals
from npu_bridge.base.install import INSTALL_HOROVOD
from npu_bridge.collective import wire_names
from npu_bridge.collective.apart import run_in_separate_graph
from npu_bridge.collective.engines import horovod_restart, thread_priority
from npu_bridge.collective.engines.communicator import SeveralRanks
from npu_bridge.collective.engines.transfer_tensors import (
    move_as_bits,
    prevent_folding,
    prevent_op_merging,
    reduce_scatter_dtype,
)
from npu_bridge.collective.rendezvous import barrier
from npu_bridge.collective.wire_names import name_collective

# Functions that run eager collectives, for all trainings except the first one; the oldest ones are dropped.
_FUNCTIONS: dict[tuple, Callable] = {}
_MOST_FUNCTIONS = 1000  # more than a step of large models has; one broadcast can use one for each variable
_NO_FUSION_OF_GROUPS = "HOROVOD_DISABLE_GROUP_FUSION"


class HorovodUnavailableError(RuntimeError):
    """Raised if a job has several ranks, but there is no Horovod that works with this TensorFlow."""


class HorovodCommunicator(SeveralRanks):
    """The ranks of a Horovod job. The constructor starts Horovod, which closes itself at exit.

    New groups are declared by restarting Horovod, which takes a quarter of a second. The alternative would be
    "dynamic" process sets, which can be added at any time. But then Horovod's background thread always takes a quarter
    of a core on every rank: 2 ranks on 2 cores took 1.3 to 1.45 times as long for a step of matrix products and one
    small collective. Without Gloo's launcher Horovod cannot be restarted, and is started with dynamic process sets.

    Raises:
      HorovodUnavailableError: Horovod cannot be imported; the message has the command that installs Horovod.
    """

    def __init__(self):
        self._hvd = _import_horovod()
        if not self._hvd.is_initialized():
            if environment.read_variable(_NO_FUSION_OF_GROUPS) is None:
                # When Horovod fuses collectives as they become ready, it sums over the ranks in changing orders: two
                # trainings of three ranks would differ in bits. And small, urgent collectives would wait for large
                # ones.
                environment.write_variable(_NO_FUSION_OF_GROUPS, 1)
            with thread_priority.give_new_threads_real_time_priority():
                self._hvd.init(process_sets=None if horovod_restart.can_restart() else "dynamic")
        self._process_set = self._hvd.global_process_set
        self.rank = self._hvd.rank()
        self.size = self._hvd.size()
        self.local_rank = self._hvd.local_rank()
        self.local_size = self._hvd.local_size()
        self.members = tuple(range(self.size))
        self._known_sets = {}

    def _sum_vector(self, vector, name, average):
        # A group of one tensor: Horovod fuses a single tensor with others that are ready, but not a group.
        operation = self._hvd.Average if average else self._hvd.Sum
        (total,) = self._run_collective(self._hvd.grouped_allreduce, name, [vector], op=operation)
        return prevent_op_merging(total)

    def reduce(self, tensor, reduction, name):
        (wide,) = prevent_folding([tf.cast(tensor, self._wide_dtype(tensor.dtype))])
        hvd = self._hvd
        operation = {"sum": hvd.Sum, "max": hvd.Max, "min": hvd.Min, "prod": hvd.Product}[reduction]
        reduced = self._run_collective(hvd.allreduce, name, wide, op=operation)
        return tf.cast(prevent_op_merging(reduced), tensor.dtype)

    def reduce_scatter(self, tensor, reduction, name):
        if reduction != "sum":
            return tf.split(self.reduce(tensor, reduction, name), self.size)[self.rank]
        (wide,) = prevent_folding([tf.cast(tensor, reduce_scatter_dtype(tensor.dtype))])
        part = self._run_collective(self._hvd.reducescatter, name, wide, op=self._hvd.Sum)
        return tf.cast(prevent_op_merging(part), tensor.dtype)

    def all_gather(self, tensor, name):
        def gather(part):
            return prevent_op_merging(self._run_collective(self._hvd.allgather, name, *prevent_folding([part])))

        return move_as_bits(tf.convert_to_tensor(tensor), gather, is_marked=True)

    def _broadcast_numbers(self, tensor, root_rank, name):
        def send(value):
            # Horovod counts the root in the job, not in the group.
            root = self.members[root_rank]
            return prevent_op_merging(
                self._run_collective(self._hvd.broadcast, name, *prevent_folding([value]), root_rank=root)
            )

        return move_as_bits(tensor, send)

    def all_to_all(self, tensor, counts, name):
        received_counts = []

        def send(blocks):
            # prevent_folding copies the smaller input, the counts.
            blocks, splits = prevent_folding([blocks, tf.cast(counts, tf.int32)])
            received, arrived = self._run_collective(self._hvd.alltoall, name, blocks, splits)
            received_counts.append(arrived)
            return prevent_op_merging(received)

        return move_as_bits(tensor, send), received_counts[0]

    def exchange_integers(self, numbers, exchange_name, group_text="its group"):
        # Read before the exchange: afterwards another rank can already be restarting Horovod.
        self._known_sets = horovod_internals.declared_process_sets(self._hvd)
        gather, give_up = (lambda: self._gather_lists(numbers, exchange_name)), self._hvd.shutdown
        return barrier.run_barrier(gather, exchange_name, self.rank, self.size, give_up, group_text)

    def open_groups(self, groups, exchange_name):
        known = self._known_sets
        new = [list(members) for members in groups if list(members) not in known.values()]
        if new and environment.is_flag_on("HOROVOD_DYNAMIC_PROCESS_SETS"):
            for members in new:
                self._hvd.add_process_set(members)
        elif new:
            _check_restart()
            declared = [members for number, members in sorted(known.items()) if number]
            horovod_restart.restart_horovod(
                self._hvd, self.rank, self.size, [*declared, *new], f"{exchange_name}_restart"
            )
        sets = horovod_internals.declared_process_sets(self._hvd)
        numbers = {tuple(members): number for number, members in sets.items()}
        return [_HorovodGroup(self._hvd, numbers[tuple(members)], self.rank, members) for members in groups]

    def _run_collective(self, collective, name, *tensors, **settings):
        """Calls a function of Horovod under a name that is the same on every rank, and returns its result."""

        def send(*given):
            with name_collective(name) as named:
                return collective(*given, process_set=self._process_set, **settings, **named)

        label = wire_names.current_collectives_label() if tf.executing_eagerly() else ""
        if not label:
            return send(*tensors)
        # Eager collectives of one kind all have one name, the operator's. In functions they keep their own names.
        specs = tf.nest.map_structure(lambda tensor: tf.TensorSpec(tensor.shape, tensor.dtype), tensors)
        key = (collective, label, name, self._process_set.process_set_id, str(specs), *settings.items())
        function = _FUNCTIONS.get(key)
        if function is None:
            if len(_FUNCTIONS) >= _MOST_FUNCTIONS:
                _FUNCTIONS.pop(list(_FUNCTIONS)[0], None)  # as one operation, beside other threads
            function = _FUNCTIONS[key] = tf.function(send, autograph=False).get_concrete_function(*specs)
        return function(*tensors)

    def _gather_lists(self, numbers, exchange_name):
        def gather(length, own):
            return [
                self._hvd.allgather(length, name=f"{exchange_name}_lengths", process_set=self._process_set),
                self._hvd.allgather(own, name=exchange_name, process_set=self._process_set),
            ]

        lengths, joined = run_in_separate_graph(gather, np.array([len(numbers)], np.int32), np.array(numbers, np.int64))
        lists, start = [], 0
        for length in lengths:
            lists.append([int(number) for number in joined[start : start + length]])
            start += length
        return lists


class _HorovodGroup(HorovodCommunicator):
    """A group of some of the ranks of a Horovod job; `rank` is None in a process that is not a member."""

    def __init__(self, hvd, number, world_rank, members):
        self._hvd = hvd
        self._process_set = horovod_internals.process_set(hvd, number, members)
        self.members = tuple(members)
        self.size = len(members)
        self.rank = self.members.index(world_rank) if world_rank in members else None


def _check_restart():
    if not horovod_restart.can_restart():
        raise RuntimeError(
            "hccl.create_group: the script has started Horovod in a way that allows no groups. Expected "
            'hvd.init(process_sets="dynamic") under MPI or in an elastic job; got hvd.init(). Change the call, or set '
            "HOROVOD_DYNAMIC_PROCESS_SETS=1 for every rank."
        )


def _import_horovod():
    try:
        import horovod.tensorflow as hvd
    except Exception as error:  # the loader of a broken extension can raise anything
        raise HorovodUnavailableError(
            f"npu_bridge.collective: several ranks were started, but Horovod cannot be used. Expected horovod 0.28 "
            f"built for TensorFlow {tf.__version__} and Python {platform.python_version()}; got "
            f"{type(error).__name__}: {error}. Install it with: {INSTALL_HOROVOD}"
        ) from error
    return hvd
