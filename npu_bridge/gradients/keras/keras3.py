"""Wraps optimizers of Keras 3 (`keras.optimizers.Optimizer`) on TensorFlow in a pipeline; imports Keras 3."""

from __future__ import annotations

import copy
import functools

import numpy as np

from npu_bridge.base.errors import message
from npu_bridge.base.plain_config import to_python_numbers
from npu_bridge.base.tf_internals import keras3
from npu_bridge.base.tf_internals.graphs import original_variable_of
from npu_bridge.base.tf_internals.keras3 import variables_built_with
from npu_bridge.collective import wire_names
from npu_bridge.gradients.checkpoints.kept_state import warn_about_unloaded_optimizer
from npu_bridge.gradients.inner.families import adapt_optimizer
from npu_bridge.gradients.keras.own_variables import (
    CHECKPOINT_LABEL,
    NAMES_KEY,
    all_shapes_fit,
    load_matching_values,
    numbered_names,
)
from npu_bridge.gradients.keras.settings import KerasSettings
from npu_bridge.gradients.keras.shared import LossScaleMixin, PipelineMixin, make_forwarding_method

_COUNT_BEFORE_BUILD = 2  # the step count and the learning rate

keras = keras3.load_keras3(__name__)


@keras.saving.register_keras_serializable(package="npu_bridge")
class Keras3PipelineOptimizer(PipelineMixin, keras.optimizers.Optimizer):
    """Wraps an optimizer of Keras 3, and passes gradients through a pipeline first.

    As usual in Keras 3, `apply` expects gradients of the loss that `scale_loss` returned in the same function. If
    `scale_loss` was not called there, `apply` expects gradients of the unscaled loss. In eager execution, so does
    a second `apply` of the same variables, unless two losses were scaled.
    """

    _adapt = staticmethod(functools.partial(adapt_optimizer, accepts_keras3=True))

    def __init__(self, optimizer, settings):
        super().__init__(optimizer, settings)
        if optimizer.built:
            self.build(variables_built_with(optimizer))

    def __setattr__(self, name, value):
        if name == "loss_scale_factor":  # Keras reads this of each optimizer whose loss it scales
            problem = "loss scaling must be outside the reduction, and happen once"
            expected = "npu_keras_optimizer(opt, loss_scale_manager) outside of all other optimizers"
            got = (
                f"loss_scale_factor={value!r} from an optimizer around it, such as LossScaleOptimizer of mixed_float16"
            )
            fix = (
                "Pass a loss_scale_manager to npu_keras_optimizer, or auto_scale_loss=False to compile. "
                "Wrap a MultiOptimizer as a whole, not the optimizers inside."
            )
            raise ValueError(message(self._settings.documented_name, problem, expected, got, fix))
        super().__setattr__(name, value)

    def build(self, variables):
        """Creates the slots of the variables, and the state of the stages for these variables.

        Raises:
          ValueError: a variable has `overwrite_with_gradient`, as in float8.
        """
        for variable in variables:
            if getattr(variable, "overwrite_with_gradient", False):
                problem, expected = "Keras passes scales of float8 as gradients", "only gradients"
                fix = "Quantize the model after the training."
                raise ValueError(message(self.name, problem, expected, f"the scale {variable.path}", fix))
        values = self._pipeline.inner.values_of(variables)
        self._pipeline.inner.create_state(values)
        self._pipeline.pipeline.create_variables(values)

    def scale_loss(self, loss):
        """Returns the loss to differentiate, a tensor; if the optimizer scales the loss, the scaled loss."""
        return self._pipeline.scale_loss(loss)

    def apply(self, grads, trainable_variables=None):
        """Averages gradients over the ranks and updates the variables, unless a stage skips the step.

        Args:
          grads: gradients of the scaled loss, or the result of `get_unscaled_gradients`; elements can be None.
          trainable_variables: a Keras or TensorFlow variable for each gradient; by default the variables with which the
            optimizer was built.
        Raises:
          ValueError: the numbers of variables and gradients differ, or `scale_loss` was called in another function.
        Ranks: collective where the pipeline communicates.
        """
        if trainable_variables is None:
            trainable_variables = map(original_variable_of, variables_built_with(self._optimizer))
        grads, variables = list(grads), list(trainable_variables)
        if len(grads) != len(variables):
            problem, expected = "there are not as many variables as gradients", f"{len(grads)} variables"
            fix = "Pass one variable for each gradient."
            raise ValueError(message(f"{self.name}.apply", problem, expected, f"{len(variables)}", fix))
        if not grads:
            return
        if not self.built:
            self.build(variables)
        pairs = list(zip(grads, self._pipeline.inner.values_of(variables)))
        self._pipeline.apply(self._pipeline.average_scaled(pairs), self._pipeline.inner.update)

    def apply_gradients(self, grads_and_vars):
        """Calls `apply` with (gradient, variable) pairs; returns the variable that counts updates."""
        grads, variables = zip(*grads_and_vars)
        self.apply(grads, variables)
        return self.iterations

    def finalize_variable_values(self, var_list):
        """Sets the variables to their moving averages at the end of a training, if the optimizer has `use_ema`."""
        inner = self._pipeline.inner
        inner.stand_ins.call_with_stand_ins(
            inner.values_of(var_list),
            lambda seen: self._optimizer.finalize_variable_values(inner.keras_variables_of(seen)),
        )

    @property
    def learning_rate(self):
        """The learning rate of the inner optimizer."""
        return self._optimizer.learning_rate

    @property
    def variables(self):
        """All variables: of the inner optimizer, of the stages, and the stand-ins for 16-bit variables.

        Variables with a row for each rank are left out, because Keras variables cannot change their shape; these
        variables are saved in files nevertheless.
        """
        return [
            *self._optimizer.variables,
            *self._pipeline.inner.keras_variables_of(self._own_variables(), _as_keras_variable),
        ]

    def set_weights(self, weights):
        """Sets the variables in `variables`, or only the first ones if `weights` is shorter.

        Raises:
          ValueError: the inner optimizer has not been built.
        """
        values, count = list(map(np.asarray, weights)), len(self._optimizer.variables)
        self._optimizer.set_weights(values[:count])
        for variable, value in zip(self.variables[count:], values[count:]):
            variable.assign(value)

    def save_own_variables(self, store):
        """Writes all variables into a `.keras` or `.weights.h5` file, and the names of the variables of stages."""
        for number, variable in enumerate(self._all_variables()):
            store[str(number)] = variable.numpy()
        names = "\n".join(numbered_names(len(self._inner_variables()), self._own_variables()))
        if names:  # otherwise the bare optimizer can read the file
            store[NAMES_KEY] = np.frombuffer(names.encode(), np.uint8)  # Keras 3 stores arrays only

    def load_own_variables(self, store):
        """Reads the variables from a `.keras` or `.weights.h5` file, even if the file was saved with other stages.

        As usual in Keras, an optimizer that is not built stays as it is, with a warning. The same happens if the file
        has no slots, because the model was saved before its first step.

        Raises:
          ValueError: the file was saved with another inner optimizer.
        """
        values = {name: store[name] for name in store.keys()}  # noqa: SIM118 - a file is no mapping
        noted = bytes(values.pop(NAMES_KEY, b"")).decode().splitlines()
        inner_count = int(noted[0].partition("=")[0]) if noted else len(values)
        if not self.built or inner_count <= _COUNT_BEFORE_BUILD < len(self._inner_variables()):
            reason = "because the file has no slots" if self.built else "because it is not built (optimizer.build)"
            warn_about_unloaded_optimizer(CHECKPOINT_LABEL, reason)
            return
        if load_matching_values(values, self._inner_variables(), self._own_variables(), noted):
            return
        variables, arrays = self._all_variables(), [values[number] for number in map(str, range(len(values)))]
        if len(variables) != len(arrays) or not all_shapes_fit(variables, arrays):
            problem, expected = (
                "the file was saved with another optimizer",
                f"the {len(variables)} variables of this optimizer",
            )
            fix = "Compile the model with the optimizer of the saved model."
            raise ValueError(message(self.name, problem, expected, f"{len(values)} other variables", fix))
        for variable, value in zip(variables, arrays):
            variable.assign(value)

    def get_config(self):
        inner = keras.optimizers.serialize(self._optimizer)
        return to_python_numbers({"optimizer": inner, **self._settings.to_config(), "generation": "keras3"})

    @classmethod
    def from_config(cls, config, custom_objects=None):
        inner = copy.deepcopy(config["optimizer"])  # Keras changes what it reads
        # Not `keras.optimizers.deserialize`, whose list lacks Lamb (Keras 3.15).
        optimizer = keras.saving.deserialize_keras_object(inner, custom_objects)
        with wire_names.mark_optimizers_as_restored():
            return cls(optimizer, KerasSettings.from_config(config))

    add_optimizer_variables = make_forwarding_method("add_optimizer_variables")
    add_variable = make_forwarding_method("add_variable")
    add_variable_from_reference = make_forwarding_method("add_variable_from_reference")
    exclude_from_weight_decay = make_forwarding_method("exclude_from_weight_decay")
    update_step = make_forwarding_method("update_step")


@keras.saving.register_keras_serializable(package="npu_bridge")
class Keras3LossScaleOptimizer(LossScaleMixin, Keras3PipelineOptimizer, keras.optimizers.LossScaleOptimizer):
    """Adds loss scaling; derives from the loss-scale optimizer of Keras, so that Keras adds no second loss scaling."""


def _as_keras_variable(variable):
    """Wraps a TensorFlow variable in a Keras variable; returns None if the shape can change."""
    if not variable.shape.is_fully_defined():
        return None
    return keras.Variable(variable, trainable=False, name=variable.name.partition(":")[0].replace("/", "_"))
