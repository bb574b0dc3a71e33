"""What a training step has to wait for of the step before it, variable by variable.

A step that begins while the one before goes on gives the same numbers if whatever outlives a step, such as a variable,
is read and written in the order of the steps. So who reads a variable waits for who wrote it in the step before, and
who writes it also for who read it there. Nothing else is shared: what is computed in between belongs to its step. Who
reads a TF 1 reference variable gets its buffer and may look at it late; so who writes one waits for all of the step
before.

Operators that keep their state in themselves, as transfers between ranks do, wait for themselves. What is not known
here is not guessed at.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import NamedTuple

import tensorflow as tf

from npu_bridge.rewrite.conditions import Condition, conditions_of_tensor, find_conditions
from npu_bridge.rewrite.loop_draws import draws_unseeded_numbers
from npu_bridge.rewrite.loop_nodes import LOOP_OPS, NotLoopableError

NEXT_BATCH = "IteratorGetNext"
# What gives access to something that outlives a step, and what reads that without changing it.
_ITERATORS = ("IteratorV2", "OneShotIterator")
_REFERENCES = ("Variable", "VariableV2")
_READERS = {
    **dict.fromkeys(_ITERATORS + _REFERENCES, ()),
    "HashTableV2": ("LookupTableFindV2", "LookupTableSizeV2"),
    "VarHandleOp": ("ReadVariableOp", "ResourceGather", "ResourceGatherNd", "VarIsInitializedOp", "VariableShape"),
}
_HANDS_ON = ("Identity", "Merge", "RefIdentity", "RefMerge", "RefSwitch", "Switch")
# Horovod's kernels that leave a tensor to its own thread: none keeps a thread of the session waiting for other ranks.
_TRANSFERS = frozenset(
    {"HorovodAllgather", "HorovodAllreduce", "HorovodAlltoall", "HorovodBroadcast", "HorovodGroupedAllreduce"}
)
_AMONG_RANKS = ("Collective", "Horovod", "Nccl")
# Marked as stateful so that they are kept; these keep nothing themselves.
_WITHOUT_STATE = ("Assert", "DeepCopy")
_PRINTS = ("Print", "PrintV2")


class Handover(NamedTuple):
    """What a step leaves to the next one.

    Attributes:
      done: operators of a step.
      waiting: operators of the next step that begin when those are done.
    """

    done: tuple[tf.Operation, ...]
    waiting: tuple[tf.Operation, ...]


class _Thing(NamedTuple):
    """Something that outlives a step, and who uses it."""

    kind: str
    readers: list[tf.Operation]
    writers: list[tf.Operation]


class StepOrder:
    """The order that steps must keep when they overlap.

    Args:
      inside: the operators of a step, each after those it waits for; see `ops_inside`.
      fed: names of tensors whose value is given with the run.
    Raises:
      NotLoopableError: the step holds something whose order is not known.
    Attributes:
      ordered: the operators, each after those it waits for.
      handovers: what waits for what of the step before.
      writers: names of the operators that change a variable.
      wait_for_all: names of those that wait for all of the step before.
      conditions: by name of an operator, what must hold for it to compute anything.
    """

    def __init__(self, inside: Sequence[tf.Operation], fed: Collection[str]):
        self._fed = fed
        self._inside = {op.name for op in inside}
        for op in inside:
            _check_type(op)
        self.ordered = inside
        self.conditions: dict[str, frozenset[Condition]] = find_conditions(inside, fed)
        self._things = self._find_things()
        self._readers_before = self._find_readers_before()
        self.handovers = self._find_handovers()
        changed = [thing for thing in self._things if thing.kind not in _ITERATORS]
        self.writers = {op.name for thing in changed for op in thing.writers}
        self.wait_for_all = {op.name for thing in changed if thing.kind in _REFERENCES for op in thing.writers}
        for handover in self.handovers:
            for op in handover.done:
                self._check_conditions(op)

    def waited_for(self, op: tf.Operation) -> list[tf.Operation]:
        """The operators inside that one waits for, in an order that is the same on every rank."""
        read = [tensor.op for tensor in op.inputs if tensor.name not in self._fed]
        controls = sorted(op.control_inputs, key=lambda other: other._id)
        return [other for other in (*read, *controls) if other.name in self._inside]

    def _find_things(self):
        """What outlives a step and is used by it."""
        things: dict[tuple, _Thing] = {}
        behind: dict[str, frozenset] = {}
        for op in self.ordered:
            for tensor, expected in zip(op.inputs, op._input_types):
                if tensor.dtype != tf.resource and not tensor.dtype._is_ref_dtype:
                    continue
                handles = self._things_behind(tensor, op, behind)
                if any(out.dtype == tf.resource or out.dtype._is_ref_dtype for out in op.outputs):
                    behind[op.name] = behind.get(op.name, frozenset()) | handles
                if expected == tf.resource or expected._is_ref_dtype:
                    if op.type in _HANDS_ON:
                        continue
                for handle in handles:
                    kind = handle[0]
                    if kind in _ITERATORS and op.type != NEXT_BATCH:
                        raise NotLoopableError({op: f"{op.name} ({op.type}) uses an iterator in a way of its own"})
                    is_reader = op.type in _READERS[kind] or (kind in _REFERENCES and not expected._is_ref_dtype)
                    thing = things.setdefault(handle, _Thing(kind, [], []))
                    (thing.readers if is_reader else thing.writers).append(op)
        return list(things.values())

    def _things_behind(self, tensor, user, behind):
        handle = tensor.op
        if tensor.name in self._fed:
            raise NotLoopableError({user: f"{user.name} is given the handle {tensor.name}"})
        if handle.name in behind:
            return behind[handle.name]
        if handle.type not in _READERS:
            raise NotLoopableError({user: f"{user.name} uses {handle.name} ({handle.type})"})
        if _is_input_of_data(handle):
            raise NotLoopableError({user: f"the input pipeline reads {handle.name}"})
        container, name = (handle.get_attr(key).decode() for key in ("container", "shared_name"))
        return frozenset({(handle.type, container, name or handle.name)})

    def _find_handovers(self):
        waiting: dict[tuple, dict[str, tf.Operation]] = {}
        by_name = {op.name: op for op in self.ordered}

        def hand_over(done, to):
            if done:
                waiting.setdefault(tuple(op.name for op in done), {}).update((op.name, op) for op in to)

        for kind, readers, writers in self._things:
            if kind in _REFERENCES:
                hand_over(writers, readers)
            elif writers:
                hand_over(writers, [*readers, *writers])
                hand_over([reader for reader in readers if not self._is_known_done(reader, writers)], writers)
        for op in self.ordered:
            if op.type in _TRANSFERS or op.type in _PRINTS or draws_unseeded_numbers(op):
                hand_over([op], [op])
        return [Handover(tuple(by_name[name] for name in done), tuple(ops.values())) for done, ops in waiting.items()]

    def _is_known_done(self, reader, writers):
        """Whether a reader is sure to be done when the writers of its step are, also when these have nothing to do."""
        for writer in writers:
            conditions = self.conditions[writer.name]
            ends = [writer.name]
            if self.conditions[reader.name] != conditions:
                ends += [condition.predicate.partition(":")[0] for condition in conditions]
            if all(self._readers_before.get(end, 0) >> self._numbers[reader.name] & 1 for end in ends):
                return True
        return False

    def _find_readers_before(self):
        """For each operator, as bits of a number, the readers of variables it waits for."""
        readers = {op.name: op for thing in self._things for op in thing.readers}
        self._numbers = {name: number for number, name in enumerate(readers)}
        before: dict[str, int] = {}
        for op in self.ordered:
            bits = 1 << self._numbers[op.name] if op.name in self._numbers else 0
            for other in self.waited_for(op):
                bits |= before[other.name]
            before[op.name] = bits
        return before

    def _check_conditions(self, op):
        for condition in self.conditions[op.name]:
            predicate = op.graph.get_tensor_by_name(condition.predicate)
            if conditions_of_tensor(predicate, self.conditions, self._fed):
                raise NotLoopableError({op: f"{op.name} is under a condition within a condition"})


def _check_type(op):
    if op.type in LOOP_OPS:
        raise NotLoopableError({op: f"{op.name} is part of a loop of its own"})
    if op.type.startswith(_AMONG_RANKS) and op.type not in _TRANSFERS:
        raise NotLoopableError({op: f"{op.name} ({op.type}) belongs to all ranks"})
    if any(attribute.WhichOneof("value") == "func" for attribute in op.node_def.attr.values()):
        raise NotLoopableError({op: f"{op.name} ({op.type}) calls a function"})
    is_known = op.type in _WITHOUT_STATE or op.type in _PRINTS or draws_unseeded_numbers(op)
    if op.op_def.is_stateful and not is_known and not _handles(op):
        raise NotLoopableError({op: f"{op.name} ({op.type}) keeps state in itself"})


def _handles(op):
    return [tensor for tensor in op.inputs if tensor.dtype == tf.resource or tensor.dtype._is_ref_dtype]


def _is_input_of_data(handle):
    users = () if handle.type in _ITERATORS else handle.outputs[0].consumers()
    return any(out.dtype == tf.variant for user in users for out in user.outputs)
