"""Rules as Keras optimizers of both generations."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from npu_bridge.optimizers.groups import ParameterGroups
from npu_bridge.optimizers.hypers import from_config, to_config
from npu_bridge.optimizers.per_variable import as_dense, multiplied_by_factor, update, working_dtype
from npu_bridge.optimizers.rule import Rule
from npu_bridge.options.errors import message


class _KerasFace:
    """What the faces of both generations share.

    Attributes:
      rule_class: set by each optimizer.
    """

    rule_class: type = Rule

    def _take_rule(self, arguments, groups):
        self.rule = self.rule_class(**arguments)
        self._group_arguments = groups
        self._groups = ParameterGroups(self.rule, groups)

    def _rule_config(self):
        groups = self._group_arguments
        if groups and not all(isinstance(group["match"], str) for group in groups):
            raise ValueError(
                message(
                    self.rule_class.__name__,
                    "groups of variables cannot be written into a configuration",
                    "regular expressions",
                    "variables",
                    'Give "match" as a regular expression, or save weights only.',
                )
            )
        return {**to_config(self.rule), "groups": groups}

    def _update(self, variable, gradient, slots):
        treatment = self._groups.of(variable)
        is_own_rate = treatment.rule.learning_rate is self.rule.learning_rate
        rate = self._rate_of_now() if is_own_rate else None
        return update(variable, gradient, slots, treatment, self.iterations, rate)

    @classmethod
    def from_config(cls, config, custom_objects=None):
        """The counterpart of `get_config`."""
        return cls(**from_config(config))


class KerasOptimizer(_KerasFace, tf.keras.optimizers.Optimizer):
    """A rule as a `tf.keras.optimizers.Optimizer`.

    Args:
      groups: see `ParameterGroups`.
      name: name of the optimizer.
      **arguments: those of the rule. Schedules are read at `iterations`.
    """

    def __init__(self, groups: Sequence[dict] | None = None, name: str | None = None, **arguments: Any):
        base = {key: arguments.pop(key) for key in ("clipnorm", "clipvalue", "global_clipnorm") if key in arguments}
        self._take_rule(arguments, groups)
        super().__init__(name=name or self.rule_class.__name__, jit_compile=False, **base)
        self._learning_rate = self._build_learning_rate(self.rule.learning_rate)

    def build(self, var_list):
        super().build(var_list)
        if getattr(self, "_built", False):
            return
        self._groups.check(var_list)
        self._slots = [
            {
                slot: self.add_variable_from_reference(
                    variable, slot, initial_value=tf.fill(variable.shape, tf.cast(start, working_dtype(variable)))
                )
                for slot, start in self._groups.of(variable).rule.slots().items()
            }
            for variable in var_list
        ]
        self._built = True

    def _rate_of_now(self):
        return self.learning_rate

    def apply_gradients(self, grads_and_vars, *arguments, **keywords):
        """Updates the variables; see `tf.keras.optimizers.Optimizer.apply_gradients`."""
        grads_and_vars = list(grads_and_vars)
        if self.rule.uses_global_norm:
            grads_and_vars = multiplied_by_factor(self.rule, grads_and_vars)
        return super().apply_gradients(grads_and_vars, *arguments, **keywords)

    def update_step(self, gradient, variable):
        """Updates one variable."""
        self._update(variable, gradient, self._slots[self._index_dict[self._var_key(variable)]])

    def get_config(self):
        """The rule's arguments and those of every Keras optimizer."""
        base = super().get_config()
        own = {key: base[key] for key in ("name", "clipnorm", "clipvalue", "global_clipnorm")}
        return {**own, **self._rule_config()}


class KerasLegacyOptimizer(_KerasFace, tf.keras.optimizers.legacy.Optimizer):
    """A rule as a `tf.keras.optimizers.legacy.Optimizer`; arguments as of `KerasOptimizer`."""

    def __init__(self, groups: Sequence[dict] | None = None, name: str | None = None, **arguments: Any):
        base = {key: arguments.pop(key) for key in ("clipnorm", "clipvalue", "global_clipnorm") if key in arguments}
        self._take_rule(arguments, groups)
        super().__init__(name or self.rule_class.__name__, **base)
        self._set_hyper("learning_rate", self.rule.learning_rate)

    def _create_slots(self, var_list):
        self._groups.check(var_list)
        for variable in var_list:
            dtype = working_dtype(variable)
            for slot, start in self._groups.of(variable).rule.slots().items():
                self.add_slot(variable, slot, tf.fill(variable.shape, tf.cast(start, dtype)))

    def _resource_apply_dense(self, grad, var, apply_state=None):
        slots = {slot: self.get_slot(var, slot) for slot in self._groups.of(var).rule.slots()}
        return self._update(var, grad, slots)

    def _resource_apply_sparse(self, grad, var, indices, apply_state=None):
        return self._resource_apply_dense(as_dense(tf.IndexedSlices(grad, indices, tf.shape(var))), var)

    def _rate_of_now(self):
        return self._decayed_lr(tf.float32)

    def _transform_gradients(self, grads_and_vars):
        grads_and_vars = super()._transform_gradients(grads_and_vars)
        return multiplied_by_factor(self.rule, grads_and_vars) if self.rule.uses_global_norm else grads_and_vars

    def get_config(self):
        """The rule's arguments and those of every legacy Keras optimizer."""
        return {**super().get_config(), **self._rule_config()}
