"""Keeps the slots of many variables in one flat variable, from update to update, until other code needs the slots.

With flat slots, an update is one op on one variable instead of hundreds of ops, one on each variable. Other code, such
as a checkpoint, a restore, an initialiser or a fetch, still uses the original slot variables. So each op that refers to
a slot variable first moves all slots from the flat variable back. The next update moves them into the flat variable
again. While the flat variable exists, it holds the slots, and the slot variables are empty. A lock prevents moves and
updates at the same time.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from typing import Any

from npu_bridge.base import kept_in_graph
from npu_bridge.base.own_tensorflow import tf
from npu_bridge.base.tf_internals.graphs import add_control_inputs

# TensorFlow exports collections with text keys only.
_KEY = ("npu_bridge", "flat_slots")
_NOTHING = ("npu_bridge", "function that does nothing")


def find_or_make_flat_slots(slots: Sequence[dict], sizes: Sequence[int]) -> FlatSlots | None:
    """Returns the flat form of slots, made at the first call; None if the slots cannot be flat.

    Slots cannot be flat outside of TF 1 graphs, in TF 1 reference variables, or if one of them is already flat together
    with other slots.

    Args:
      slots: for each variable, its slots by name.
      sizes: number of elements of each variable.
    """
    graph = tf.compat.v1.get_default_graph()
    if tf.executing_eagerly() or graph.building_function or not all(slots):
        return None
    if not all(hasattr(slot, "handle") for own in slots for slot in own.values()):
        return None
    by_slot = kept_in_graph.find_or_make(graph, _KEY, dict)
    key = tuple(slot.ref() for own in slots for slot in own.values())
    found = {id(by_slot.get(reference)): by_slot.get(reference) for reference in key}
    if list(found.values()) == [None]:
        made = FlatSlots(slots, sizes)
        by_slot.update(dict.fromkeys(key, made))
        made.key = key
        return made
    flat = next(iter(found.values()))
    return flat if len(found) == 1 and flat.key == key else None


class FlatSlots:
    """The slots of a batch of variables, with one flat variable for each slot name.

    Attributes:
      handles: resource handles of the flat variables by slot name, usable only inside `lock_for_update`.
      key: references of all slot variables, which identify the batch.
      name: a name that is unique in a session.
    """

    key: tuple = ()

    def __init__(self, slots: Sequence[dict], sizes: Sequence[int]):
        self._shapes = [next(iter(own.values())).shape for own in slots]
        self._sizes = list(sizes)
        self._names = list(slots[0])
        self._dtype = slots[0][self._names[0]].dtype.base_dtype
        self._shared_names = {name: [_shared_name(own[name]) for own in slots] for name in self._names}
        self.name = f"{self._shared_names[self._names[0]][0]}/flat"
        with tf.init_scope(), tf.device(slots[0][self._names[0]].device), tf.name_scope("flat_slots"):
            self.handles = self._make_flat_variable_handles()
            self._mutex = tf.raw_ops.MutexV2(shared_name=self.name)
            self._move_in, self._move_out = map(_trace_function, (self._move_to_flat, self._move_from_flat))
            graph = tf.compat.v1.get_default_graph()
            self._nothing = kept_in_graph.find_or_make(graph, _NOTHING, lambda: _trace_function(lambda: None))
            lock = tf.raw_ops.MutexLock(mutex=self._mutex)
            with tf.control_dependencies([lock]):
                given = self._build_if_flat(self._move_out, self._nothing)
            with tf.control_dependencies([given]):
                released = tf.raw_ops.ConsumeMutexLock(mutex_lock=lock)
        for own in slots:
            for slot in own.values():
                add_control_inputs(slot.handle.op, [released])

    @contextlib.contextmanager
    def lock_for_update(self, inputs: Sequence[tf.Tensor], end_ops: list):
        """Moves the slots into the flat variables, and locks the flat variables for the ops inside the context.

        Args:
          inputs: tensors that the update waits for; the lock is taken after them.
          end_ops: list to fill with the ops that end the update.
        """
        with tf.control_dependencies(inputs):
            lock = tf.raw_ops.MutexLock(mutex=self._mutex)
        with tf.control_dependencies([lock]):
            taken = self._build_if_flat(self._nothing, self._move_in)
        with tf.control_dependencies([taken]):
            yield
        with tf.control_dependencies(end_ops):
            end_ops.append(tf.raw_ops.ConsumeMutexLock(mutex_lock=lock))

    def read(self) -> dict:
        """Returns the values of the flat variables by slot name."""
        size = sum(self._sizes)
        return {
            name: tf.ensure_shape(tf.raw_ops.ReadVariableOp(resource=handle, dtype=self._dtype), [size])
            for name, handle in self.handles.items()
        }

    def write(self, values: dict) -> list:
        """Returns the ops that assign values to the flat variables."""
        return [tf.raw_ops.AssignVariableOp(resource=self.handles[name], value=value) for name, value in values.items()]

    def _make_flat_variable_handles(self):
        return {
            name: tf.raw_ops.VarHandleOp(
                dtype=self._dtype, shape=[sum(self._sizes)], shared_name=f"{self.name}_{name}", name=name
            )
            for name in self._names
        }

    def _build_if_flat(self, then_branch, else_branch):
        is_flat = tf.raw_ops.VarIsInitializedOp(resource=self.handles[self._names[0]])
        # Not lowered to switches: inside a function, hundreds of ops that hardly ever run cost nothing.
        return tf.raw_ops.If(cond=is_flat, input=[], Tout=[], then_branch=then_branch, else_branch=else_branch)

    def _move_to_flat(self):
        """Moves the slots into the flat variables."""
        for name, flat in self._make_flat_variable_handles().items():
            places = list(zip(self._shared_names[name], self._shapes))
            values = [
                tf.raw_ops.ReadVariableOp(resource=self._slot_handle(*place), dtype=self._dtype) for place in places
            ]
            joined = tf.concat([tf.reshape(value, [-1]) for value in values], 0)
            tf.raw_ops.AssignVariableOp(resource=flat, value=joined)
            with tf.control_dependencies([joined]):
                for shared_name, _ in places:
                    nothing = tf.zeros([0], self._dtype)
                    tf.raw_ops.AssignVariableOp(resource=self._slot_handle(shared_name, None), value=nothing)

    def _move_from_flat(self):
        """Moves the flat variables back into the slots of each variable."""
        for name, flat in self._make_flat_variable_handles().items():
            parts = tf.split(tf.raw_ops.ReadVariableOp(resource=flat, dtype=self._dtype), self._sizes)
            for shared_name, shape, part in zip(self._shared_names[name], self._shapes, parts):
                own = self._slot_handle(shared_name, shape)
                tf.raw_ops.AssignVariableOp(resource=own, value=tf.reshape(part, shape))
            tf.raw_ops.DestroyResourceOp(resource=flat)

    def _slot_handle(self, shared_name, shape):
        return tf.raw_ops.VarHandleOp(dtype=self._dtype, shape=tf.TensorShape(shape), shared_name=shared_name)


def _shared_name(slot: Any) -> str:
    return slot.handle.op.get_attr("shared_name").decode()


def _trace_function(function):
    return tf.function(function, autograph=False).get_concrete_function()
