"""Shards the weight update: every rank updates variables of about equal bytes, and receives the others from owners."""

from __future__ import annotations

from npu_bridge import collective
from npu_bridge.base.errors import message
from npu_bridge.base.own_tensorflow import tf
from npu_bridge.collective.engines.transfer_tensors import prevent_pruning
from npu_bridge.gradients.arithmetic import gradient_parts
from npu_bridge.gradients.checkpoints import remote_slots
from npu_bridge.gradients.graph_mode import is_building_graph
from npu_bridge.gradients.inner.interface import InnerOptimizer
from npu_bridge.gradients.inner.ownership import fair_division
from npu_bridge.gradients.stage import Stage

# Bytes a rank adds to one transfer. 120 variables of 1 MB took 82 ms as a broadcast each, and 51 to 62 ms in pieces of
# 1 MB or more (2 ranks on one machine, Gloo; best of 9); small pieces keep few copies at a time.
PIECE_BYTES = 16 * 2**20


class SharedUpdate(Stage):
    """A stage that makes the ranks check, before the first collective, that all of them shard the update."""

    place = "update"

    def agreed_settings(self, grads_and_vars):
        return {"is_weight_update_sharding": True}


class ShardedOptimizer(InnerOptimizer):
    """An inner optimizer that divides the variables among the ranks, so that each rank updates only its own variables.

    All ranks must get the same, reduced gradients. Each rank updates the variables that it owns; then the ranks send
    each other the updated variables. The results equal those of the inner optimizer alone, because it updates each
    variable independently. Slots exist on the owner only; `remote_slots` saves them in checkpoints. A variable never
    changes its owner.

    Args:
      inner: the optimizer that updates, with reduced gradients.
      name: prefix of the names of the collectives; the same on every rank.
    Raises:
      ValueError: the optimizer needs all gradients at once, for example to clip by their global norm.
    Ranks: collective. With one rank, works like the inner optimizer.
    """

    def __init__(self, inner: InnerOptimizer, name: str):
        super().__init__(inner.optimizer, saved_as=inner.saved_as)
        self._inner, self.updates_in_float32 = inner, inner.updates_in_float32
        self._name = name
        self._owners = {}
        self._parts = []
        self._prepared = set()
        _check_can_be_sharded(inner.optimizer)

    def compute_gradients(self, loss, **arguments):
        grads_and_vars = self._inner.compute_gradients(loss, **arguments)
        if collective.current().size > 1:
            self._assign_owners([variable for grad, variable in grads_and_vars if grad is not None])
        return grads_and_vars

    def create_state(self, variables):
        ranks = collective.current()
        if ranks.size == 1:
            self._inner.create_state(variables)
            return
        _check_is_tf1_graph(self._name)
        self._assign_owners(variables)
        new = [variable for variable in variables if variable.ref() not in self._prepared]
        if new:
            self._prepared.update(variable.ref() for variable in new)
            by_owner = [[v for v in new if self._owner_of(v) == rank] for rank in range(ranks.size)]
            self._parts.append(remote_slots.find_or_make_remote_slots(ranks).add(self._inner, by_owner))

    def make_slots(self, variables):
        if collective.current().size == 1:
            return self._inner.make_slots(variables)
        return super().make_slots(variables)

    def make_own_and_remote_slots(self, own_variables, remote_variables, creator):
        self._inner.make_own_and_remote_slots(own_variables, remote_variables, creator)

    def apply_gradients(self, grads_and_vars, global_step, name):
        ranks = collective.current()
        given = [(grad, variable) for grad, variable in grads_and_vars if grad is not None]
        if ranks.size == 1 or not given:
            return self._inner.apply_gradients(grads_and_vars, global_step, name)
        variables = [variable for _, variable in given]
        self.create_state(variables)
        self._check_all_ranks_update(variables, ranks.size)
        own = [(grad, variable) for grad, variable in given if self._owner_of(variable) == ranks.rank]
        update = self._inner.apply_gradients(own, global_step, name)
        # Updates of other ranks are written when no operator of this step can still read the old values.
        with tf.control_dependencies(
            [update, *(prevent_pruning(part) for grad, _ in given for part in gradient_parts(grad))]
        ):
            with tf.name_scope(f"{self._name}_Broadcast_Weight_Update_Sharding"):
                received = self._exchange_updates(variables, ranks)
            noted = [part.mark_copies_stale() for part in self._parts if part.graph is tf.compat.v1.get_default_graph()]
            return tf.group(update, *received, *noted)

    def get_slot(self, variable, name):
        if self._owner_of(variable) not in (None, collective.current().rank):
            return None
        return self._inner.get_slot(variable, name)

    def get_slot_names(self):
        return self._inner.get_slot_names()

    def variables(self):
        return self._inner.variables()

    def _owner_of(self, variable):
        return self._owners.get(variable.ref())

    def _assign_owners(self, variables):
        new = [variable for variable in variables if self._owner_of(variable) is None]
        if new:
            owners = fair_division([_size_bytes(variable) for variable in new], collective.current().size)
            self._owners.update((variable.ref(), owner) for variable, owner in zip(new, owners))

    def _check_all_ranks_update(self, variables, rank_count):
        idle = set(range(rank_count)).difference(map(self._owner_of, variables))
        if idle:
            problem = (
                "some ranks have nothing to update in this apply_gradients, so their step counts would fall behind"
            )
            expected = f"gradients of variables of each of the {rank_count} ranks"
            got = f"no gradient for {', '.join(f'rank {rank}' for rank in sorted(idle))}"
            fix = "Apply all gradients of one compute_gradients together, or use an optimizer for each loss."
            raise ValueError(message(self._name, problem, expected, got, fix))

    def _exchange_updates(self, variables, ranks):
        """Returns ops that send the updated variables of each rank to all other ranks."""
        assigned = []
        for dtype in dict.fromkeys(variable.dtype.base_dtype for variable in variables):
            by_owner = [[] for _ in range(ranks.size)]
            for variable in variables:
                if variable.dtype.base_dtype == dtype:
                    by_owner[self._owner_of(variable)].append(variable)
            for number, pieces in enumerate(_split_into_pieces(by_owner)):
                own = [tf.reshape(variable.read_value(), [-1]) for variable in pieces[ranks.rank]]
                flat = tf.concat(own, axis=0) if own else tf.zeros([0], dtype)
                joined = ranks.all_gather(flat, f"{self._name}_updated_{dtype.name}_{number}")
                # Even if all variables are this rank's own, the other ranks need the transfer.
                assigned += _assign_received_variables(joined, pieces, ranks.rank) or [prevent_pruning(joined)]
        return assigned


def _check_can_be_sharded(optimizer):
    problem = "with is_weight_update_sharding no rank updates all variables, so the inner optimizer cannot "
    norm = getattr(optimizer, "global_clipnorm", None)
    if norm is not None:
        problem, expected, got = f"{problem}clip by their global norm", "global_clipnorm=None", str(norm)
        fix = "Clip with tf.clip_by_global_norm between compute_gradients and apply_gradients."
    elif getattr(optimizer, "needs_all_gradients", False):
        problem, expected = f"{problem}use all gradients at once", "an optimizer that updates each variable separately"
        got, fix = type(optimizer).__name__, "Use is_weight_update_sharding=False."
    else:
        return
    raise ValueError(message("NPUDistributedOptimizer", problem, expected, got, fix))


def _split_into_pieces(variables_by_owner):
    """Splits the list of every owner into pieces of about `PIECE_BYTES`; yields the n-th pieces of all owners."""
    cut = [_split_by_bytes(variables) for variables in variables_by_owner]
    for number in range(max(map(len, cut))):
        yield [runs[number] if number < len(runs) else [] for runs in cut]


def _split_by_bytes(variables):
    runs, filled = [], PIECE_BYTES
    for variable in variables:
        if filled >= PIECE_BYTES:
            runs.append([])
            filled = 0
        runs[-1].append(variable)
        filled += _size_bytes(variable)
    return runs


def _assign_received_variables(joined, pieces, rank):
    variables = [variable for piece in pieces for variable in piece]
    parts = tf.split(joined, [variable.shape.num_elements() for variable in variables])
    own = {variable.ref() for variable in pieces[rank]}
    return [
        tf.compat.v1.assign(variable, tf.reshape(part, variable.shape)).op
        for variable, part in zip(variables, parts)
        if variable.ref() not in own
    ]


def _size_bytes(variable):
    """Returns the size of a variable in bytes, by which variables are divided among ranks; a scalar counts as 0."""
    if not variable.shape.is_fully_defined():
        problem, expected = "is_weight_update_sharding assigns variables to ranks by size", "a variable of known shape"
        got, fix = f"{variable.name} of shape {variable.shape}", "Give the variable a shape."
        raise ValueError(message("NPUDistributedOptimizer", problem, expected, got, fix))
    return 0 if variable.shape.rank == 0 else variable.shape.num_elements() * variable.dtype.size


def _check_is_tf1_graph(name):
    if not is_building_graph():
        problem = "with several ranks is_weight_update_sharding works only in TF 1 graphs"
        expected, got = "a graph that a session runs", "a step executed eagerly or in a tf.function"
        fix = "Build the step in tf.Graph().as_default(), or use is_weight_update_sharding=False."
        raise RuntimeError(message(name, problem, expected, got, fix))
