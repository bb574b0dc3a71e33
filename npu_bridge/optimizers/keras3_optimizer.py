"""Wraps rules as optimizers of Keras 3; loads Keras 3."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

from npu_bridge.base.plain_config import to_python_numbers
from npu_bridge.base.tf_internals import keras3
from npu_bridge.base.tf_internals.graphs import owner_of_slots
from npu_bridge.optimizers.fused import check_fused_argument
from npu_bridge.optimizers.hypers import rule_arguments_from_config
from npu_bridge.optimizers.keras_optimizer import COMMON_ARGUMENTS, KerasOptimizerBase
from npu_bridge.optimizers.unfused import apply_norm_factor, update_dtype

keras: Any = keras3.load_keras3(__name__)
keras3.check_backend("npu_bridge.optimizers.keras3")


class Keras3Optimizer(KerasOptimizerBase, keras.optimizers.Optimizer):
    """A rule as a `keras.optimizers.Optimizer` of Keras 3; arguments as in `KerasOptimizer`."""

    registered = staticmethod(keras.saving.register_keras_serializable("npu_bridge.keras3"))
    schedule_class = keras.optimizers.schedules.LearningRateSchedule

    def __init__(
        self, groups: Sequence[dict] | None = None, name: str | None = None, fused: bool = False, **arguments: Any
    ):
        base = {key: arguments.pop(key) for key in COMMON_ARGUMENTS if key in arguments}
        rule = self.rule_class(**arguments)  # before variables exist; attributes are set after those of Keras
        is_fused = check_fused_argument(self.rule_class.__name__, fused)
        super().__init__(self._rate_for_keras(rule.learning_rate), name=name or self.rule_class.__name__, **base)
        self.rule, self._is_fused = rule, is_fused
        self._set_groups(groups)

    def build(self, variables):
        """Makes the slots of variables of Keras or TensorFlow."""
        if self.built:
            return
        values = [keras3.tensorflow_variable_of(variable) for variable in variables]
        self._groups.check_groups_match(values)
        super().build(variables)
        self._updated = [owner_of_slots(value) for value in values]
        self._slots = [self._make_slots(*both) for both in zip(variables, values)]
        self._assign_deferred_states()

    def _make_slots(self, variable, value):
        prefix, dtype = keras3.prefix_of_slots(variable), update_dtype(value).name
        return {
            slot: keras3.tensorflow_variable_of(
                self.add_variable(value.shape, keras.initializers.Constant(start), dtype, name=f"{prefix}{slot}")
            )
            for slot, start in self._groups.treatment_of(value).rule.slots().items()
        }

    def _serialize_rate(self):
        return super().get_config()["learning_rate"]

    def apply(self, grads, trainable_variables=None):
        """Updates the variables; see `keras.optimizers.Optimizer.apply`."""
        changed = apply_norm_factor(self.rule, [(grad, None) for grad in grads])
        super().apply([grad for grad, _ in changed], trainable_variables)

    def update_step(self, gradient, variable, learning_rate):
        """Updates one variable, with the rate of its group."""
        self._update(keras3.tensorflow_variable_of(variable), gradient)

    def get_config(self):
        """Returns the rule's arguments and those of every Keras optimizer."""
        own = to_python_numbers({key: getattr(self, key) for key in ("name", *COMMON_ARGUMENTS)})
        return {**own, "fused": self._is_fused, **self._rule_config()}

    @classmethod
    def from_config(cls, config, custom_objects=None):
        deserialize = functools.partial(keras.optimizers.schedules.deserialize, custom_objects=custom_objects)
        return cls(**rule_arguments_from_config(config, deserialize))

    def _distributed_tf_update_step(self, distribution, grads_and_vars, learning_rate):
        if not self._is_fused or distribution.num_replicas_in_sync > 1:
            super()._distributed_tf_update_step(distribution, grads_and_vars, learning_rate)
            return
        self._update_together(grads_and_vars)

    def _slots_of(self, variable):
        return self._slots[self._get_variable_index(variable)]
