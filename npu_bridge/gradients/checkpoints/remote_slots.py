"""Saves and restores sharded optimizer slots of all ranks on rank 0, through staging variables.

Only rank 0 writes checkpoints, but a slot is on the rank that owns its variable. So the graph of rank 0 has a *staging
variable* for every slot of another rank, with the name of the slot, in host memory. A staging variable holds the value
of the slot from the initialisation or a restore until the first update, and from a checkpoint until the next update;
otherwise it is empty. Savers treat it like any other variable. So checkpoints are equal to those of a training without
sharding, and jobs with any number of ranks, sharding or not, can resume from them.

Scripts save with any saver, at any time, on rank 0 alone. So reading a staging variable must itself gather the slots:
by a broadcast of 1 from rank 0, then one all-to-all for each sharded optimizer. The owners of the slots must take part:
in sessions with hooks, the owners call `end_request_round` after steps, otherwise `send_on_request`. Each of these
calls ends with a broadcast of 0. A read while the owners do not listen must fail instead of waiting for ever or saving
an outdated slot.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence

from npu_bridge.base import kept_in_graph
from npu_bridge.base.errors import message
from npu_bridge.base.own_tensorflow import tf
from npu_bridge.base.tf_internals.graphs import add_control_inputs, set_read_tensor
from npu_bridge.collective.engines.communicator import Communicator
from npu_bridge.collective.engines.transfer_tensors import prevent_pruning
from npu_bridge.gradients.checkpoints.packing import pack_tensors, unpack_tensors
from npu_bridge.gradients.graph_mode import classic_control_flow
from npu_bridge.gradients.inner.interface import InnerOptimizer

_COLLECTION = ("npu_bridge", "remote_slots")  # not a string, so TensorFlow does not export the collection
_SCOPE = "weight_update_sharding/"  # at the root, whatever scope the optimizer is used in
_NOT_LISTENING = message(
    "is_weight_update_sharding",
    "slots of other ranks cannot be saved now, because those ranks are not listening",
    "a save on every rank with NPUSaver, or by a hook of rank 0 that comes before NPUBroadcastGlobalVariablesHook",
    "a save of rank 0 alone",
    "Save with npu_bridge.estimator.npu.npu_saver.NPUSaver on every rank.",
)

_NEEDS_HOROVOD = message(
    "is_weight_update_sharding",
    "slots cannot be saved where ranks exchange tensors by TensorFlow's own collectives in a TF 1 graph",
    "ranks of Horovod",
    "NPU_COLLECTIVES=tensorflow, or no Horovod",
    "Install Horovod (npu-run doctor --fix), or leave out is_weight_update_sharding.",
)


def find_remote_slots(graph: tf.Graph) -> RemoteSlots | None:
    """Returns the remote slots of a graph; None if the graph has no sharded optimizer."""
    kept = graph.get_collection_ref(_COLLECTION)
    return kept[0] if kept else None


def find_or_make_remote_slots(ranks: Communicator) -> RemoteSlots:
    """Returns the remote slots of the default graph; makes them at the first call."""
    return kept_in_graph.find_or_make(tf.compat.v1.get_default_graph(), _COLLECTION, lambda: RemoteSlots(ranks))


def broadcast_with_slots(variables: Sequence, ranks: Communicator, root_rank: int) -> tf.Operation | None:
    """Broadcasts variables from one rank to all ranks; slots of sharded optimizers are sent to their owners only.

    Args:
      variables: variables of the default graph, including slots.
      ranks: communicator of all ranks.
      root_rank: the rank whose values are sent.
    Returns:
      The op to run; None in eager execution.
    Raises:
      ValueError: there are sharded slots, and `root_rank` is not 0.
    Ranks: collective.
    """
    whole = None if tf.executing_eagerly() else find_remote_slots(tf.compat.v1.get_default_graph())
    if whole is None:
        return ranks.broadcast_variables(variables, root_rank)
    if root_rank != 0:
        problem, expected = "only rank 0 can hold all slots when weight updates are sharded", "root_rank 0"
        got = str(root_rank)
        raise ValueError(message("broadcast_global_variables", problem, expected, got, "Use root_rank=0."))
    sharded = {slot.ref() for slot in whole.variables()}
    alike = [variable for variable in variables if variable.ref() not in sharded]
    return tf.group(ranks.broadcast_variables(alike, 0), whole.distribute())


class RemoteSlots:
    """The slots of all sharded optimizers of one graph.

    Graph: all operators are in one scope, so that other names are equal on every rank.
    Ranks: every rank must add the same parts in the same order.
    """

    def __init__(self, ranks: Communicator):
        if not ranks.runs_can_differ:
            raise RuntimeError(_NEEDS_HOROVOD)
        self.ranks = ranks
        self._parts = []
        with tf.init_scope(), _place_ops_on_host():  # outside of the caller's conditions and dependencies
            is_hooked, is_listened_to = _SessionFlag("is_hooked"), _SessionFlag("is_listened_to")
            self._is_stale = _SessionFlag("is_stale")  # whether the staging variables are out of date
            self._has_moved = _SessionFlag("has_moved")  # whether a step was run since the last round
            self._hook, self._listen_to, self._unlisten = is_hooked.set(), is_listened_to.set(), is_listened_to.clear()
            self._moved, self._forget_move = self._has_moved.is_set(), self._has_moved.clear()
            self.is_stale = self._is_stale.is_set()
            self._is_done = tf.compat.v1.placeholder_with_default(False, [])
            may_request = self._is_done | is_listened_to.is_set() | (is_hooked.is_set() & self._moved)
            self.asked = (
                self._request_slots(may_request) if ranks.rank == 0 else ranks.broadcast(tf.constant(0), 0, "asked")
            )
            self.refreshed = tf.group(self.asked, name="refreshed")

    def add(self, inner: InnerOptimizer, variables_by_owner: list[list]) -> RemoteSlotGroup:
        """Creates slots of variables on their owners, and staging variables on rank 0; every rank must call this."""
        part = RemoteSlotGroup(self, inner, variables_by_owner, len(self._parts))
        self._parts.append(part)
        return part

    def variables(self) -> list:
        """Returns this rank's sharded slots and, on rank 0, the variables that hold slots of other ranks for savers."""
        return [slot for part in self._parts for slots in part.slots_by_owner for slot in slots]

    def distribute(self) -> tf.Operation:
        """Returns an op that sends initial or restored slots from rank 0 to the ranks that own them; collective."""
        return tf.group(*self.distribution_ops())

    def distribution_ops(self) -> list[tf.Operation]:
        """Returns one op per slot group: the ops that `distribute` runs together."""
        return [part.distributed for part in self._parts]

    def mark_copies_stale(self) -> tf.Operation:
        """Returns an op that records an update, after which rank 0's copies of other ranks' slots are out of date."""
        return tf.group(self._is_stale.set(), self._has_moved.set())

    def enable_request_rounds(self, session) -> None:
        """Enables `end_request_round` after each step of this session: other ranks then send their slots to rank 0."""
        session.run(self._hook)

    def end_request_round(self, session, is_last: bool) -> bool:
        """Makes other ranks wait and send slots on request, until rank 0 also calls this method; collective.

        Each step has two rounds: the first one right after the step, before any other collective; the last one before
        the next step or the end. After the last round rank 0 cannot save. Does nothing if no step was run.

        Args:
          session: the training session.
          is_last: whether this is the last round of the step.
        Returns:
          True if a step was run.
        """
        if not session.run(self._moved):
            return False
        if self.ranks.rank == 0:
            self._end_listening(session)
        else:
            self.send_on_request(session)
        if is_last:
            session.run(self._forget_move)
        return True

    @contextlib.contextmanager
    def allow_remote_reads(self, session):
        """Allows reads of staging variables on rank 0 inside the context; collective.

        Other ranks call `send_on_request`.
        """
        session.run(self._listen_to)
        try:
            yield
        finally:
            session.run(self._unlisten)
            self._end_listening(session)

    def send_on_request(self, session) -> None:
        """Sends the slots of this rank to rank 0 on each request, until rank 0 has no more requests; collective."""
        while session.run(self.asked):
            session.run([part.sent for part in self._parts])

    def _end_listening(self, session):
        session.run(self.asked, {self._is_done: True})

    def _request_slots(self, may_request):
        """Broadcasts 1 to request slots, or 0 to end the round. Requests nothing if rank 0 has current slots."""

        def broadcast_request():
            with tf.compat.v1.name_scope(_SCOPE):
                check = tf.raw_ops.Assert(condition=may_request, data=[_NOT_LISTENING])
                with tf.control_dependencies([check]):
                    asked = self.ranks.broadcast(tf.where(self._is_done, 0, 1), 0, "asked")
                with tf.control_dependencies([prevent_pruning(asked)]):
                    return tf.identity(asked)

        with classic_control_flow():
            return tf.cond(self._is_done | self.is_stale, broadcast_request, lambda: tf.constant(0))


class RemoteSlotGroup:
    """Sharded slots of one optimizer that were made together.

    Attributes:
      graph: the graph of the slots.
      slots_by_owner: for every rank, the slots that it owns: variables on the owner, staging variables on rank 0, and
        an empty list on other ranks.
      sent: op that sends the slots of this rank to rank 0; exists on ranks above 0.
      distributed: op that sets the slots of this rank to their values on rank 0, if rank 0 has values.
    """

    def __init__(self, whole: RemoteSlots, inner: InnerOptimizer, variables_by_owner: list[list], number: int):
        self._whole = whole
        self.graph = tf.compat.v1.get_default_graph()
        rank = whole.ranks.rank
        here = range(whole.ranks.size) if rank == 0 else [rank]
        others = {owner: variables_by_owner[owner] for owner in here if owner != rank}
        inner.make_own_and_remote_slots(variables_by_owner[rank], others, _make_staging_variable)
        self.slots_by_owner = [
            inner.slots_of(variables) if owner in here else [] for owner, variables in enumerate(variables_by_owner)
        ]
        self._staging = [slot for slots in self.slots_by_owner[1:] for slot in slots] if rank == 0 else []
        with tf.init_scope(), _place_ops_on_host():  # outside of the caller's conditions and dependencies
            if rank == 0:
                self.distributed = self._send_to_owners(f"given_{number}")
                self._gather_slots_before_reads(f"gathered_{number}")
            else:
                self.sent = self._send_to_rank_0(f"gathered_{number}")
                self.distributed = self._receive_from_rank_0(f"given_{number}")

    def mark_copies_stale(self) -> tf.Operation:
        """Returns an op that records an update and empties the staging variables, which are then out of date."""
        fillable = [staging for staging in self._staging if _full_shape(staging).num_elements()]
        if not fillable:
            return self._whole.mark_copies_stale()

        def empty():
            return tf.group(
                *[
                    tf.raw_ops.AssignVariableOp(resource=staging.handle, value=tf.zeros([0], staging.dtype))
                    for staging in self._staging
                ]
            )

        with _place_ops_on_host(), classic_control_flow():
            is_full = tf.reduce_prod(tf.raw_ops.VariableShape(input=fillable[0].handle)) > 0
            emptied = tf.cond(is_full, empty, tf.no_op)
        return tf.group(emptied, self._whole.mark_copies_stale())

    def _gather_slots_before_reads(self, name):
        """Makes savers gather the current slots of other ranks before they read a staging variable."""

        def gather():
            with tf.compat.v1.name_scope(_SCOPE):
                none = [0] * self._whole.ranks.size
                words, _ = self._whole.ranks.all_to_all(tf.zeros([0], tf.int64), none, name)
                # Even without slots, because the other ranks send and wait for a receiver.
                return tf.group(*(_assign_packed(self.slots_by_owner[1:], words) or [prevent_pruning(words)]))

        with tf.control_dependencies([self._whole.refreshed.control_inputs[0]]), classic_control_flow():
            gathered = tf.cond(self._whole.is_stale, gather, tf.no_op)
        # All parts are gathered together, even parts added after a saver was made.
        add_control_inputs(self._whole.refreshed, [gathered.op if isinstance(gathered, tf.Tensor) else gathered])
        for staging in self._staging:
            _delay_reads_until(staging, self._whole.refreshed)

    def _send_to_rank_0(self, name):
        words = _packed_values(self.slots_by_owner[self._whole.ranks.rank])
        counts = [tf.size(words), *[0] * (self._whole.ranks.size - 1)]
        return prevent_pruning(self._whole.ranks.all_to_all(words, tf.stack(counts), name)[0])

    def _send_to_owners(self, name):
        words = [_packed_values(slots) for slots in self.slots_by_owner[1:]]
        counts = tf.stack([0, *map(tf.size, words)])
        return prevent_pruning(self._whole.ranks.all_to_all(tf.concat(words, axis=0), counts, name)[0])

    def _receive_from_rank_0(self, name):
        ranks = self._whole.ranks
        words, _ = ranks.all_to_all(tf.zeros([0], tf.int64), [0] * ranks.size, name)
        slots = [self.slots_by_owner[ranks.rank]]
        with classic_control_flow():
            return tf.group(tf.cond(tf.size(words) > 0, lambda: tf.group(*_assign_packed(slots, words)), tf.no_op))


class _SessionFlag:
    """A boolean in a session, False at the start: whether a certain resource has been initialised.

    The resource holds no value of interest. It is in no collection, so checkpoints do not contain it.
    """

    def __init__(self, name):
        self._handle = tf.raw_ops.VarHandleOp(dtype=tf.bool, shape=[], shared_name=_SCOPE + name, name=name)

    def set(self):
        with tf.device("/cpu:0"):
            return tf.raw_ops.AssignVariableOp(resource=self._handle, value=True)

    def clear(self):
        return tf.raw_ops.DestroyResourceOp(resource=self._handle, ignore_lookup_error=True)

    def is_set(self):
        return tf.raw_ops.VarIsInitializedOp(resource=self._handle)


@contextlib.contextmanager
def _place_ops_on_host():
    """Places ops on the host and under the scope `_SCOPE` inside the context."""
    with tf.device("/cpu:0"), tf.compat.v1.name_scope(_SCOPE):
        yield


def _make_staging_variable(next_creator, **arguments):
    """Creates a variable in host memory whose value can be empty; for `tf.variable_creator_scope`."""
    arguments.update(shape=tf.TensorShape(None), validate_shape=False)
    if "use_resource" in arguments:
        arguments["use_resource"] = True
    with tf.compat.v1.get_default_graph().colocate_with(None, ignore_existing=True), tf.device("/cpu:0"):
        return next_creator(**arguments)


def _delay_reads_until(staging, op):
    """Makes savers wait for `op` before they read a staging variable."""
    with tf.control_dependencies([op]):
        value = tf.raw_ops.ReadVariableOp(resource=staging.handle, dtype=staging.dtype)
    set_read_tensor(staging, value)


def _full_shape(slot):
    return slot.initial_value.shape


def _packed_values(slots):
    return pack_tensors([slot.read_value() for slot in slots])


def _assign_packed(slots_by_owner, words):
    """Returns ops that assign to the slots the values in `words`, the concatenated `_packed_values` of all owners."""
    specs = [[tf.TensorSpec(_full_shape(slot), slot.dtype.base_dtype) for slot in slots] for slots in slots_by_owner]
    return [
        tf.compat.v1.assign(slot, value).op
        for slots, values in zip(slots_by_owner, unpack_tensors(words, specs))
        for slot, value in zip(slots, values)
    ]
