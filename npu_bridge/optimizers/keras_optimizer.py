"""Wraps rules as Keras 2 optimizers, for `tf.keras.optimizers` and `tf.keras.optimizers.legacy`."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from typing import Any

from npu_bridge.base.errors import message
from npu_bridge.base.own_tensorflow import tf
from npu_bridge.base.plain_config import to_python_numbers
from npu_bridge.base.tf_internals import keras3
from npu_bridge.base.tf_internals.graphs import owner_of_slots
from npu_bridge.collective.checks.exchanges import watch_updates
from npu_bridge.optimizers import states
from npu_bridge.optimizers.fused import PendingUpdate, check_fused_argument, fused_batch_key, update_variables_together
from npu_bridge.optimizers.groups import ParameterGroups, distinct_names
from npu_bridge.optimizers.hypers import (
    compute_hyper_value,
    compute_hyper_values,
    rule_arguments_from_config,
    rule_to_config,
)
from npu_bridge.optimizers.rule import Rule, is_number
from npu_bridge.optimizers.unfused import apply_norm_factor, as_dense, update_dtype, update_variable

watch_updates()  # a script can import this module alone
COMMON_ARGUMENTS = ("clipnorm", "clipvalue", "global_clipnorm")


@contextlib.contextmanager
def _choose_working_dtype(variable):
    """Makes Keras create slots in the dtype in which the variable is updated, not in 16 bits; yields this dtype."""
    dtype = update_dtype(variable)

    def create(next_creator, **arguments):
        return next_creator(**{**arguments, "dtype": dtype})

    with tf.variable_creator_scope(create):
        yield dtype


class KerasOptimizerBase:
    """Base of the optimizer classes for all Keras versions.

    Attributes:
      rule_class: the rule, set by each optimizer class.
      other_keywords: arguments that do not belong to the rule.
      registered: a decorator that registers a class with Keras, which then finds the class when it loads a file.
      schedule_class: the class of Keras's schedules.
    """

    rule_class: type = Rule
    other_keywords = COMMON_ARGUMENTS
    registered: Any = staticmethod(tf.keras.utils.register_keras_serializable("npu_bridge.keras"))
    schedule_class: type = tf.keras.optimizers.schedules.LearningRateSchedule
    iterations: Any
    _is_fused = False

    @property
    def needs_all_gradients(self) -> bool:
        """True if an update needs the norm of all gradients, so that ranks cannot share the work."""
        return self.rule.uses_global_norm

    def joint_update_key(self, variable):
        """Returns a key that is equal for variables updated as one flat tensor; None for other variables."""
        return fused_batch_key(variable, self._groups.treatment_of(variable)) if self._is_fused else None

    @property
    def _counter(self):
        return keras3.tensorflow_variable_of(self.iterations)

    def _set_rule(self, arguments, groups):
        """Sets the rule and its groups from arguments; returns the arguments that every Keras optimizer has."""
        base = {key: arguments.pop(key) for key in COMMON_ARGUMENTS if key in arguments}
        self.rule = self.rule_class(**arguments)
        self._set_groups(groups)
        return base

    def _set_groups(self, groups):
        # Keras would wrap lists and dictionaries, and count variables in them as variables of the optimizer.
        self.__dict__["_group_arguments"] = groups
        # Follows `exclude_from_weight_decay` of Keras, which legacy optimizers lack.
        self._groups = ParameterGroups(self.rule, groups, getattr(self, "_use_weight_decay", None))
        self._updated: list[Any] = []
        self._deferred_states = states.DeferredStates()

    def _rule_config(self):
        groups = self._group_arguments
        if groups and not all(isinstance(group["match"], str) for group in groups):
            problem, expected = "groups of variables cannot be written into a configuration", "regular expressions"
            fix = 'Give "match" as a regular expression, or save weights only.'
            raise ValueError(message(self.rule_class.__name__, problem, expected, "variables", fix))
        config = rule_to_config(self.rule)
        if self._is_kept_by_keras(self.rule.learning_rate):  # so scripts and callbacks can set it
            config["learning_rate"] = to_python_numbers(self._serialize_rate())
        return {**config, "groups": groups and [to_python_numbers(dict(group)) for group in groups]}

    def _is_kept_by_keras(self, rate):
        is_known = isinstance(rate, tf.Tensor) and hasattr(rate, "numpy")
        return is_number(rate) or is_known or isinstance(rate, self.schedule_class)

    def _rate_for_keras(self, rate):
        """Returns a learning rate in a form that Keras keeps, or else reads at each update."""
        if self._is_kept_by_keras(rate):
            return rate if isinstance(rate, self.schedule_class) else float(rate)
        # Keras does not pass the step to functions.
        return lambda: compute_hyper_value(rate, self._counter, tf.float32)

    def _serialize_rate(self):
        """Returns the current learning rate, or the current schedule, for a configuration."""
        raise NotImplementedError

    def _update(self, variable, gradient):
        treatment = self._groups.treatment_of(variable)
        hypers = compute_hyper_values(
            treatment, self.iterations, update_dtype(variable), self._settable_rate(treatment)
        )
        return update_variable(variable, gradient, self._slots_of(variable), treatment, hypers)

    def _settable_rate(self, treatment):
        """Returns the learning rate that can be set; None for variables whose group has a separate rate."""
        return None if treatment.has_own_rate else self._current_rate()

    def _current_rate(self):
        return self.learning_rate

    def _update_together(self, grads_and_vars):
        pending = [
            PendingUpdate(
                variable, as_dense(grad, variable), self._slots_of(variable), self._groups.treatment_of(variable)
            )
            for grad, variable in grads_and_vars
        ]
        update_variables_together(pending, self._counter, self._settable_rate)

    def _slots_by_name(self):
        return dict(zip(distinct_names(self._updated), getattr(self, "_slots", ())))

    def get_states(self) -> dict:
        """Returns the number of updates and the slots; see `states.get_states`."""
        return self._deferred_states.add_kept_values(states.get_states(self._counter, self._slots_by_name()))

    def set_states(self, values: dict) -> None:
        """Restores the result of `get_states`; see `states.set_states`.

        An optimizer without slots keeps the states until it makes the slots, in `build` or the first update. Errors in
        the states are then raised at that time.
        """
        slots = self._slots_by_name()
        if slots or not tf.executing_eagerly():
            states.set_states(type(self).__name__, values, self._counter, slots)
        else:
            self._deferred_states.defer_states(type(self).__name__, values, self._counter)

    def _assign_deferred_states(self):
        self._deferred_states.assign(type(self).__name__, self._counter, self._slots_by_name())

    @classmethod
    def from_config(cls, config, custom_objects=None):
        """Makes an optimizer from the result of `get_config`."""
        return cls(**rule_arguments_from_config(config))


class _RateOfEachUpdate(tf.keras.optimizers.schedules.LearningRateSchedule):
    """A callable or a tensor of a graph as a schedule, because Keras 2 reads other rates only once."""

    def __init__(self, rate):
        self._rate = rate

    def __call__(self, step):
        return compute_hyper_value(self._rate, step, tf.float32)


class KerasOptimizer(KerasOptimizerBase, tf.keras.optimizers.Optimizer):
    """A rule as a `tf.keras.optimizers.Optimizer`.

    Args:
      groups: see `ParameterGroups`.
      name: name of the optimizer.
      fused: update many variables at once, with the same results except for rounding. Has no effect while a
        `tf.distribute.Strategy` has several replicas.
      **arguments: arguments of the rule. Schedules are read at `iterations`.
    """

    def __init__(
        self, groups: Sequence[dict] | None = None, name: str | None = None, fused: bool = False, **arguments: Any
    ):
        base = self._set_rule(arguments, groups)
        # The rule decays weights. A decay of 0, Keras's default, would still be computed for each variable.
        super().__init__(name=name or self.rule_class.__name__, jit_compile=False, weight_decay=None, **base)
        rate = self.rule.learning_rate
        is_variable = isinstance(rate, tf.Variable)
        self._learning_rate = rate if is_variable else self._build_learning_rate(self._rate_for_keras(rate))
        self._is_fused = check_fused_argument(self.rule_class.__name__, fused)

    def build(self, var_list):
        super().build(var_list)
        if getattr(self, "_built", False):
            return
        self._groups.check_groups_match(var_list)
        self._updated = list(map(owner_of_slots, var_list))
        self._slots = []
        for variable in var_list:
            with _choose_working_dtype(variable) as dtype:
                starts = self._groups.treatment_of(variable).rule.slots().items()
                values = {slot: tf.fill(variable.shape, tf.cast(start, dtype)) for slot, start in starts}
                made = {
                    slot: self.add_variable_from_reference(variable, slot, None, value)
                    for slot, value in values.items()
                }
            self._slots.append(made)
        self._built = True
        self._assign_deferred_states()

    def _rate_for_keras(self, rate):
        return super()._rate_for_keras(rate) if self._is_kept_by_keras(rate) else _RateOfEachUpdate(rate)

    def _serialize_rate(self):
        return self._serialize_hyperparameter(self._learning_rate)

    def apply_gradients(self, grads_and_vars, *arguments, **keywords):
        """Updates the variables; see `tf.keras.optimizers.Optimizer.apply_gradients`."""
        grads_and_vars = apply_norm_factor(self.rule, list(grads_and_vars))
        return super().apply_gradients(grads_and_vars, *arguments, **keywords)

    def update_step(self, gradient, variable):
        """Updates one variable."""
        self._update(variable, gradient)

    def get_config(self):
        """Returns the rule's arguments and those of every Keras optimizer."""
        base = super().get_config()
        own = to_python_numbers({key: base[key] for key in ("name", *COMMON_ARGUMENTS)})
        return {**own, "fused": self._is_fused, **self._rule_config()}

    def _distributed_apply_gradients_fn(self, distribution, grads_and_vars, **keywords):
        if not self._is_fused or distribution.num_replicas_in_sync > 1:
            return super()._distributed_apply_gradients_fn(distribution, grads_and_vars, **keywords)
        self._update_together(grads_and_vars)
        return self.iterations.assign_add(1)

    def _slots_of(self, variable):
        return self._slots[self._index_dict[self._var_key(variable)]]


class KerasLegacyOptimizer(KerasOptimizerBase, tf.keras.optimizers.legacy.Optimizer):
    """A rule as a `tf.keras.optimizers.legacy.Optimizer`; arguments as in `KerasOptimizer`, without `fused`."""

    registered = staticmethod(tf.keras.utils.register_keras_serializable("npu_bridge.legacy"))

    def __init__(
        self, groups: Sequence[dict] | None = None, name: str | None = None, fused: bool = False, **arguments: Any
    ):
        if check_fused_argument(self.rule_class.__name__, fused):
            problem, expected = "legacy Keras optimizers update one variable after the other", "fused=False"
            fix = f"Use npu_bridge.optimizers.keras.{self.rule_class.__name__}."
            raise ValueError(message(self.rule_class.__name__, problem, expected, "fused=True", fix))
        base = self._set_rule(arguments, groups)
        super().__init__(name or self.rule_class.__name__, **base)
        rate = self.rule.learning_rate
        self._set_hyper("learning_rate", self._rate_for_keras(rate) if callable(rate) else rate)

    def _create_slots(self, var_list):
        self._groups.check_groups_match(var_list)
        updated = [*self._updated, *map(owner_of_slots, var_list)]
        self._updated = list({variable.ref(): variable for variable in updated}.values())
        for variable in var_list:
            with _choose_working_dtype(variable) as dtype:
                for slot, start in self._groups.treatment_of(variable).rule.slots().items():
                    self.add_slot(variable, slot, tf.fill(variable.shape, tf.cast(start, dtype)))
        self._assign_deferred_states()

    def _resource_apply_dense(self, grad, var, apply_state=None):
        return self._update(var, grad)

    def _resource_apply_sparse(self, grad, var, indices, apply_state=None):
        return self._resource_apply_dense(as_dense(tf.IndexedSlices(grad, indices), var), var)

    def _current_rate(self):
        return self._decayed_lr(tf.float32)

    def _serialize_rate(self):
        return self._serialize_hyperparameter("learning_rate")

    def _slots_by_name(self):
        return dict(zip(distinct_names(self._updated), map(self._slots_of, self._updated)))

    def _slots_of(self, variable):
        return {slot: self.get_slot(variable, slot) for slot in self._groups.treatment_of(variable).rule.slots()}

    def _transform_gradients(self, grads_and_vars):
        return apply_norm_factor(self.rule, super()._transform_gradients(grads_and_vars))

    def get_config(self):
        """Returns the rule's arguments and those of every legacy Keras optimizer."""
        return {**to_python_numbers(super().get_config()), **self._rule_config()}
