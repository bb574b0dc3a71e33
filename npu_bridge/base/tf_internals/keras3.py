"""Finds Keras 3 beside Keras 2, and wraps private parts of Keras 3. Seen in Keras 3.15.1."""

from __future__ import annotations

import importlib
import importlib.util
import os
import sys
import types
from collections.abc import Iterable
from typing import Any, Callable

from npu_bridge.base.after_import import call_when_loaded, wrap_function
from npu_bridge.base.errors import message
from npu_bridge.base.tf_internals.names import KERAS

_MODULE = "keras"
_OPTIMIZER_MODULE = "keras.src.optimizers.base_optimizer"


def loaded_keras3() -> types.ModuleType | None:
    """Returns Keras 3 if this process has fully loaded it, else None; loads nothing."""
    module = None if KERAS == _MODULE else sys.modules.get(_MODULE)
    return module if hasattr(module, "__version__") else None  # set at the end of the import


def load_keras3(owner: str) -> types.ModuleType:
    """Returns Keras 3, and loads it if needed; messages name `owner`, the module that needs Keras 3.

    Raises:
      ImportError: `keras` is Keras 2 here, or is not installed.
    """
    if KERAS == _MODULE:
        problem, expected = "there is no Keras 3 beside this TensorFlow", "TensorFlow 2.16 or later"
        fix = "Use tf.keras, and take optimizers of this package from npu_bridge.optimizers.keras."
        raise ImportError(message(owner, problem, expected, "TensorFlow 2.15", fix))
    return importlib.import_module(_MODULE)


def call_when_keras3_loaded(callback: Callable[[types.ModuleType], None]) -> None:
    """Calls `callback` with Keras 3: now if Keras 3 is loaded, else as soon as it is.

    Does nothing if `keras` is Keras 2, or if called while Keras 3 is being loaded.
    """
    if KERAS != _MODULE and (loaded_keras3() is not None or _MODULE not in sys.modules):
        call_when_loaded(_MODULE, callback)


def is_tf_keras(tensorflow: types.ModuleType) -> bool:
    """Returns whether `tf.keras` became Keras 3 at its first use (`KerasLazyLoader._tfll_keras_version`, TF 2.21)."""
    module = vars(tensorflow).get("keras")
    settled = {} if module is None else object.__getattribute__(module, "__dict__")
    return settled.get("_tfll_keras_version") == "keras_3" or settled.get("__name__") == f"{_MODULE}._tf_keras.keras"


def redirect_to_keras_2(tensorflow: types.ModuleType) -> None:
    """Makes `from tensorflow.keras.layers import Dense` find Keras 2, even if TensorFlow was loaded first.

    Seen in TensorFlow 2.21: `tensorflow.__path__` begins with the folder that has `keras`.
    """
    package = importlib.util.find_spec(KERAS)
    for place in (package and package.submodule_search_locations) or ():
        folder = os.path.join(place, "api", "_v2")
        if folder not in tensorflow.__path__:
            tensorflow.__path__.insert(0, folder)


def is_optimizer(value: Any) -> bool:
    """Returns whether a value is an optimizer of Keras 3."""
    keras = loaded_keras3()
    return keras is not None and isinstance(value, keras.optimizers.Optimizer)


def is_model(value: Any) -> bool:
    """Returns whether a value is a model of Keras 3."""
    keras = loaded_keras3()
    return keras is not None and isinstance(value, keras.Model)


def is_schedule(value: Any) -> bool:
    """Returns whether a value is a learning-rate schedule of Keras 3."""
    keras = loaded_keras3()
    return keras is not None and isinstance(value, keras.optimizers.schedules.LearningRateSchedule)


def is_loss_scaling_optimizer(value: Any) -> bool:
    """Returns whether a value is an optimizer of Keras 3 that scales the loss."""
    return is_optimizer(value) and (
        isinstance(value, loaded_keras3().optimizers.LossScaleOptimizer) or value.loss_scale_factor is not None
    )


def check_backend(owner: str) -> None:
    """Refuses a loaded Keras 3 whose backend is not TensorFlow.

    Raises:
      ValueError: the backend is another library; the message names `owner`.
    """
    found = backend()
    if found != "tensorflow":
        problem, expected = "Keras 3 computes with another library", "KERAS_BACKEND=tensorflow"
        fix = "Set KERAS_BACKEND before keras is imported."
        raise ValueError(message(owner, problem, expected, f"KERAS_BACKEND={found}", fix))


def backend() -> str:
    """Returns the backend of a loaded Keras 3, such as "tensorflow"."""
    return sys.modules[_MODULE].backend.backend()


def variables_built_with(optimizer: Any) -> list:
    """Returns the trained variables of a built Keras 3 optimizer, else [] (`_trainable_variables`, Keras 3.15)."""
    return list(optimizer._trainable_variables)


def batches_in_window(optimizer: Any) -> list[int]:
    """Returns how many batches Keras 3 has accumulated for its next update; [] if it accumulates none.

    Seen in `BaseOptimizer._iterations` of Keras 3.15, which counts batches. `iterations` counts updates.
    """
    steps = optimizer.gradient_accumulation_steps if is_optimizer(optimizer) else None
    return [int(optimizer._iterations) % steps] if steps else []


def tensorflow_variable_of(variable: Any) -> Any:
    """Returns a Keras 3 variable's TensorFlow variable; any other variable unchanged (`Variable.value`, Keras 3.15)."""
    keras = loaded_keras3()
    if keras is None or not isinstance(variable, keras.Variable):
        return variable
    value = variable.value
    if hasattr(value, "assign"):  # not a cast value
        value.path = variable.path  # for `name_of`
    return value


def name_of(variable: Any) -> str:
    """Returns a variable's name with those of its layers, without the output number (`Variable.path`, Keras 3.15).

    In a subclassed model of Keras 3, the name of the TensorFlow variable lacks the layers: `model/kernel:0`.
    """
    return getattr(variable, "path", None) or variable.name.partition(":")[0]


def reject_keras_variables(owner: str, variables: Iterable) -> None:
    """Raises an error for variables of Keras 3.

    Raises:
      TypeError: a variable is of Keras 3; the message names `owner`.
    """
    for variable in variables:
        if tensorflow_variable_of(variable) is not variable:
            problem, got = "a variable is of Keras 3", f"the keras.Variable {variable.path}"
            fix = (
                "Use npu_keras_optimizer(optimizer, stages=[...]), or pass the value of each variable: variable.value."
            )
            raise TypeError(message(owner, problem, "variables of TensorFlow", got, fix))


def prefix_of_slots(variable: Any) -> str:
    """Returns the prefix of a variable's slot names (`BaseOptimizer.add_variable_from_reference`, Keras 3.15)."""
    if hasattr(variable, "path"):
        return f"{variable.path.replace('/', '_')}_"
    return f"{variable.name.replace('/', '_').replace(':', '_')}_"


def copy_constraint_and_path(stand_in: Any, variable: Any) -> None:
    """Copies what optimizers read of a Keras 3 variable to its stand-in (`tf.Variable.constraint`, Keras 3.15)."""
    stand_in._constraint = getattr(variable, "constraint", None)
    if hasattr(variable, "path"):
        stand_in.path = variable.path


def watch_optimizers(after_creation: Callable[[Any], Any], before_update: Callable[[Any, list], Any]) -> None:
    """Calls `after_creation` with each new Keras 3 optimizer, and `before_update` right before its updates.

    Does not load Keras 3. Both functions are as in `training.watch_keras_optimizers`. Seen in Keras 3.15:
    `BaseOptimizer._backend_apply_gradients`, which gets all gradients at once.
    """

    def init_and_report(method, optimizer, *arguments, **keywords):
        method(optimizer, *arguments, **keywords)
        after_creation(optimizer)

    def report_and_apply(apply, optimizer, grads, trainable_variables):
        before_update(optimizer, list(zip(grads, trainable_variables)))
        return apply(optimizer, grads, trainable_variables)

    def wrap_optimizer(module):
        wrap_function(module.BaseOptimizer, "__init__", init_and_report)
        wrap_function(module.BaseOptimizer, "_backend_apply_gradients", report_and_apply)

    if KERAS != _MODULE:
        call_when_loaded(_OPTIMIZER_MODULE, wrap_optimizer)
