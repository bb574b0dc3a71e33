"""Wraps optimizers of Keras 3 (`keras.optimizers.Optimizer`) on TensorFlow in a pipeline; loads Keras 3."""

from __future__ import annotations

import copy
import functools

import numpy as np

from npu_bridge.base.errors import message
from npu_bridge.base.own_tensorflow import tf
from npu_bridge.base.plain_config import plain_value
from npu_bridge.base.tf_internals import keras3
from npu_bridge.base.tf_internals.keras3 import variables_built_with
from npu_bridge.collective import wire_names
from npu_bridge.gradients.inner import adapt
from npu_bridge.gradients.keras.own_variables import fits_all, load_by_name, names_by_number
from npu_bridge.gradients.keras.settings import KerasSettings
from npu_bridge.gradients.keras.shared import LossScaleMixin, PipelineMixin, delegated

keras = keras3.load(__name__)
# The key under which a file holds these names, as an array of bytes: Keras 3 stores arrays only.
_NAMES = "npu_bridge_names"


@keras.saving.register_keras_serializable(package="npu_bridge")
class Keras3PipelineOptimizer(PipelineMixin, keras.optimizers.Optimizer):
    """Passes gradients through a pipeline and updates with an optimizer of Keras 3.

    As in all of Keras 3, `apply` expects gradients of the loss that `scale_loss` returned, in the same function. If
    `scale_loss` was not called, they count as gradients of the original loss.
    """

    _adapt = staticmethod(functools.partial(adapt, takes_keras3=True))

    def __init__(self, optimizer, settings):
        super().__init__(optimizer, settings)
        if optimizer.built:
            self.build(variables_built_with(optimizer))

    def __setattr__(self, name, value):
        if name == "loss_scale_factor":  # Keras reads it from every optimizer for which it scales the loss
            problem = "loss scaling must be outside the reduction, and happen once"
            expected = "npu_keras_optimizer(opt, loss_scale_manager) outside of all other optimizers"
            got = f"loss_scale_factor={value!r} from LossScaleOptimizer, which compile adds in mixed_float16, or others"
            fix = (
                "Pass a loss_scale_manager to npu_keras_optimizer, or auto_scale_loss=False to compile. "
                "Put it around a MultiOptimizer, not into it."
            )
            raise ValueError(message(self._settings.documented_name, problem, expected, got, fix))
        super().__setattr__(name, value)

    @tf.autograph.experimental.do_not_convert
    def build(self, variables):
        """Makes the slots of the variables, and the state that stages keep for them.

        Raises:
          ValueError: a variable is overwritten with its gradient, as in float8.
        """
        for variable in variables:
            if getattr(variable, "overwrite_with_gradient", False):
                problem, expected = "Keras passes scales of float8 as gradients", "gradients alone"
                fix = "Quantize the model after the training."
                raise ValueError(message(self.name, problem, expected, variable.path, fix))
        values = self._pipeline.inner.values_of(variables)
        self._pipeline.inner.prepare(values)
        self._pipeline.pipeline.create_variables(values)

    @tf.autograph.experimental.do_not_convert
    def scale_loss(self, loss):
        """Returns the loss to differentiate: a tensor, multiplied by the loss scale if there is one."""
        return self._pipeline.scale_loss(loss)

    @tf.autograph.experimental.do_not_convert
    def apply(self, grads, trainable_variables=None):
        """Averages gradients over the ranks, and updates the variables if the pipeline agrees.

        Args:
          grads: gradients of the scaled loss, or those of `get_unscaled_gradients`; None for a variable without one.
          trainable_variables: a Keras or TensorFlow variable for each; by default those the optimizer was built with.
        Raises:
          ValueError: the numbers of variables and gradients differ, or `scale_loss` was called in another function.
        Ranks: collective where the pipeline communicates.
        """
        if trainable_variables is None:
            trainable_variables = variables_built_with(self._optimizer)
        grads, variables = list(grads), list(trainable_variables)
        if len(grads) != len(variables):
            problem, expected = "there are not as many variables as gradients", f"{len(grads)} variables"
            fix = "Pass apply the variables of these gradients."
            raise ValueError(message(f"{self.name}.apply", problem, expected, f"{len(variables)}", fix))
        if not grads:
            return
        if not self.built:
            self.build(variables)
        pairs = list(zip(grads, self._pipeline.inner.values_of(variables)))
        self._pipeline.apply(self._pipeline.combine_scaled(pairs), self._pipeline.inner.update)

    @tf.autograph.experimental.do_not_convert
    def apply_gradients(self, grads_and_vars):
        """Calls `apply` with pairs of gradients and variables; returns the count of updates, a variable."""
        grads, variables = zip(*grads_and_vars)
        self.apply(grads, variables)
        return self.iterations

    @tf.autograph.experimental.do_not_convert
    def finalize_variable_values(self, var_list):
        """Sets the variables to their moving averages at the end of a training, if the optimizer keeps any."""
        self._optimizer.finalize_variable_values(var_list)

    @property
    def learning_rate(self):
        """The inner optimizer's learning rate."""
        return self._optimizer.learning_rate

    @property
    def variables(self):
        """The inner optimizer's variables, then those of the pipeline's stages and the stand-ins for 16-bit ones.

        Rows of all ranks are left out, because Keras variables cannot change their shape; files hold them too.
        """
        return [*self._optimizer.variables, *self._pipeline.inner.known_as(self._own_variables(), _as_keras_variable)]

    def set_weights(self, weights):
        """Sets `variables`, or the first of them.

        Raises:
          ValueError: the inner optimizer has not been built.
        """
        values, count = list(map(np.asarray, weights)), len(self._optimizer.variables)
        self._optimizer.set_weights(values[:count])
        for variable, value in zip(self.variables[count:], values[count:]):
            variable.assign(value)

    def save_own_variables(self, store):
        """Writes the values into a `.keras` or `.weights.h5` file, with the names of those that stages keep."""
        for number, variable in enumerate(self._all_variables()):
            store[str(number)] = variable.numpy()
        names = "\n".join(names_by_number(len(self._inner_variables()), self._own_variables()))
        store[_NAMES] = np.frombuffer(names.encode(), np.uint8)

    def load_own_variables(self, store):
        """Reads the values of such a file, even if it was saved with other stages.

        Raises:
          ValueError: it was saved with another inner optimizer.
        """
        values = {name: store[name] for name in store.keys()}  # noqa: SIM118 - a file is no mapping
        noted = bytes(values.pop(_NAMES, b"")).decode().splitlines()
        if load_by_name(values, self._inner_variables(), self._own_variables(), noted):
            return
        variables, arrays = self._all_variables(), [values[number] for number in map(str, range(len(values)))]
        if not fits_all(variables, arrays):
            problem, expected = "the file was saved with another optimizer", f"{len(variables)} variables of its shapes"
            fix = "Compile the model with the optimizer that the file was saved with."
            raise ValueError(message(self.name, problem, expected, f"{len(values)} others", fix))
        for variable, value in zip(variables, arrays):
            variable.assign(value)

    def get_config(self):
        """Returns the inner optimizer and the settings in JSON's types."""
        inner = keras.optimizers.serialize(self._optimizer)
        return plain_value({"optimizer": inner, **self._settings.to_config(), "generation": "keras3"})

    @classmethod
    def from_config(cls, config, custom_objects=None):
        """Makes an optimizer from the result of `get_config`."""
        inner = copy.deepcopy(config["optimizer"])  # Keras changes what it reads
        # Not `keras.optimizers.deserialize`, whose list lacks Lamb (Keras 3.15).
        optimizer = keras.saving.deserialize_keras_object(inner, custom_objects)
        with wire_names.restoring_optimizers():
            return cls(optimizer, KerasSettings.from_config(config))

    add_optimizer_variables = delegated("add_optimizer_variables")
    add_variable = delegated("add_variable")
    add_variable_from_reference = delegated("add_variable_from_reference")
    exclude_from_weight_decay = delegated("exclude_from_weight_decay")
    update_step = delegated("update_step")


@keras.saving.register_keras_serializable(package="npu_bridge")
class Keras3LossScaleOptimizer(LossScaleMixin, Keras3PipelineOptimizer, keras.optimizers.LossScaleOptimizer):
    """Adds loss scaling; Keras treats this class as its own loss scaling and adds no other."""


def _as_keras_variable(variable):
    """Wraps a TensorFlow variable as one of Keras; returns None where its shape changes."""
    if not variable.shape.is_fully_defined():
        return None
    return keras.Variable(variable, trainable=False, name=variable.name.partition(":")[0].replace("/", "_"))
