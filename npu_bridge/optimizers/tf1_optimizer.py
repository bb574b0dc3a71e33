"""Wraps rules as TF 1 optimizers."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from typing import Any

from npu_bridge.base.own_tensorflow import tf
from npu_bridge.base.tf_internals.graphs import owner_of_slots
from npu_bridge.optimizers import states
from npu_bridge.optimizers.fused import PendingUpdate, check_fused_argument, fused_batch_key, update_variables_together
from npu_bridge.optimizers.groups import ParameterGroups, distinct_names
from npu_bridge.optimizers.hypers import compute_hyper_values
from npu_bridge.optimizers.rule import Rule
from npu_bridge.optimizers.unfused import apply_norm_factor, as_dense, update_dtype, update_variable

_COUNT = "update_count"


class Tf1Optimizer(tf.compat.v1.train.Optimizer):
    """A rule as a `tf.compat.v1.train.Optimizer`.

    Args:
      groups: see `ParameterGroups`.
      name: name of the optimizer; slots are named `<variable>/<name>/<slot>`.
      fused: update many variables at once, with the same slots, and the same results except for rounding.
      **arguments: arguments of the rule. Schedules are read at the number of updates so far, without skipped steps. A
        tensor (computed from `global_step`, say) is read as it is.
    Graph: the rule's slots for each variable, in float32 at least, and one int64 count of updates named
      `<name>/update_count`.
    """

    rule_class: type = Rule
    other_keywords = ()

    def __init__(
        self, groups: Sequence[dict] | None = None, name: str | None = None, fused: bool = False, **arguments: Any
    ):
        super().__init__(use_locking=False, name=name or self.rule_class.__name__)
        self.rule = self.rule_class(**arguments)
        self._groups = ParameterGroups(self.rule, groups)
        self._is_fused = check_fused_argument(self.rule_class.__name__, fused)
        self._pending: list[PendingUpdate] = []
        self._updated: list[Any] = []
        self._lr = self.rule.learning_rate  # the attribute of TF 1 optimizers, for code that shows it

    @property
    def learning_rate(self) -> Any:
        """The learning rate as it was passed to the optimizer."""
        return self.rule.learning_rate

    @property
    def needs_all_gradients(self) -> bool:
        """True if an update needs the norm of all gradients, so that ranks cannot share the work."""
        return self.rule.uses_global_norm

    def apply_gradients(self, grads_and_vars, global_step=None, name=None):
        """Updates the variables; see `tf.compat.v1.train.Optimizer.apply_gradients`."""
        grads_and_vars = apply_norm_factor(self.rule, list(grads_and_vars))
        return super().apply_gradients(grads_and_vars, global_step=global_step, name=name)

    def get_states(self, session: tf.compat.v1.Session | None = None) -> dict:
        """Reads the number of updates and the slots of this graph in a session; see `states.get_states`."""
        with _in_graph_of(session):
            return states.get_states(self._updates_done(), self._slots_by_name(), session)

    def set_states(self, values: dict, session: tf.compat.v1.Session | None = None) -> None:
        """Restores the result of `get_states` in a session; see `states.set_states`."""
        with _in_graph_of(session):
            states.set_states(type(self).__name__, values, self._updates_done(), self._slots_by_name(), session)

    def joint_update_key(self, variable):
        """Returns a key that is equal for variables updated as one flat tensor; None for other variables."""
        return fused_batch_key(variable, self._groups.treatment_of(variable)) if self._is_fused else None

    def _slots_by_name(self):
        graph = None if tf.executing_eagerly() else tf.compat.v1.get_default_graph()
        own = [variable for variable in self._updated if graph is None or variable.graph is graph]
        return dict(zip(distinct_names(own), map(self._slots_of, own)))

    def _slots_of(self, variable):
        return {slot: self.get_slot(variable, slot) for slot in self._groups.treatment_of(variable).rule.slots()}

    def _create_slots(self, var_list):
        self._groups.check_groups_match(var_list)
        updated = [*self._updated, *map(owner_of_slots, var_list)]
        self._updated = list({variable.ref(): variable for variable in updated}.values())
        for variable in var_list:
            dtype = update_dtype(variable)
            for slot, start in self._groups.treatment_of(variable).rule.slots().items():
                starting = tf.constant_initializer(start)
                where = f"{self._name}/{slot}"
                self._get_or_make_slot_with_initializer(variable, starting, variable.shape, dtype, slot, where)
        first = min(var_list, key=lambda variable: variable.name)
        self._create_non_slot_variable(tf.constant(0, tf.int64), f"{self._name}/{_COUNT}", first)

    def _updates_done(self):
        with tf.init_scope():  # in the graph outside of functions
            graph = None if tf.executing_eagerly() else tf.compat.v1.get_default_graph()
        return self._get_non_slot_variable(f"{self._name}/{_COUNT}", graph=graph)

    def _prepare(self):
        # Read once: an op that runs late in a step would read the count after the step.
        self._count_before = tf.identity(self._updates_done())
        self._pending = []

    def _apply_dense(self, grad, var):
        treatment = self._groups.treatment_of(var)
        slots = self._slots_of(var)
        # A constraint is applied after the variable's own update.
        if self._is_fused and getattr(var, "constraint", None) is None:
            self._pending.append(PendingUpdate(var, grad, slots, treatment))
            return None
        hypers = compute_hyper_values(treatment, self._count_before, update_dtype(var))
        return update_variable(var, grad, slots, treatment, hypers)

    def _resource_apply_dense(self, grad, handle):
        return self._apply_dense(grad, handle)

    def _apply_sparse(self, grad, var):
        return self._apply_dense(as_dense(grad, var), var)

    def _resource_apply_sparse(self, grad, handle, indices):
        return self._apply_dense(as_dense(tf.IndexedSlices(grad, indices), handle), handle)

    def _finish(self, update_ops, name_scope):
        pending, self._pending = self._pending, []
        updated = [
            op for op in [*update_ops, *update_variables_together(pending, self._count_before)] if op is not None
        ]
        with tf.control_dependencies(updated):
            counted = self._updates_done().assign_add(1, read_value=False)
        return None if tf.executing_eagerly() else tf.group(*updated, counted, name=name_scope)


def _in_graph_of(session):
    """Returns a context in which the graph of a session, if there is one, is the default graph."""
    return contextlib.nullcontext() if session is None else session.graph.as_default()
