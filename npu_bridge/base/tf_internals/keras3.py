"""Keras 3 beside Keras 2: whether somebody has loaded it, and its private parts. Seen in Keras 3.15.1."""

from __future__ import annotations

import functools
import importlib
import importlib.util
import os
import sys
import types
from typing import Any, Callable

from npu_bridge.base.after_import import when_loaded
from npu_bridge.base.errors import message
from npu_bridge.base.tf_internals.names import KERAS

_MODULE = "keras"
_OPTIMIZER_MODULE = "keras.src.optimizers.base_optimizer"


def loaded() -> types.ModuleType | None:
    """Keras 3, if this process has loaded it as a whole; None where `keras` is Keras 2. It loads nothing."""
    module = None if KERAS == _MODULE else sys.modules.get(_MODULE)
    return module if hasattr(module, "__version__") else None  # which is there at the end


def load(owner: str) -> types.ModuleType:
    """Keras 3, loaded now if it is not yet; `owner` is the module that is made of it.

    Raises:
      ImportError: `keras` is Keras 2 here, or is not installed.
    """
    if KERAS == _MODULE:
        problem, expected = "there is no Keras 3 beside this TensorFlow", "TensorFlow 2.16 or later"
        fix = "Use tf.keras, with npu_bridge.optimizers.keras for optimizers of this package."
        raise ImportError(message(owner, problem, expected, "2.15", fix))
    return importlib.import_module(_MODULE)


def when_keras3_loaded(change: Callable[[types.ModuleType], None]) -> None:
    """Calls `change` with Keras 3: now if it is loaded, else once it has been.

    Not where `keras` is Keras 2, nor where this is called while Keras 3 is being loaded.
    """
    if KERAS != _MODULE and (loaded() is not None or _MODULE not in sys.modules):
        when_loaded(_MODULE, change)


def is_tf_keras(tensorflow: types.ModuleType) -> bool:
    """Whether `tf.keras` has been used before and became Keras 3 (`KerasLazyLoader._tfll_keras_version`, TF 2.21)."""
    module = vars(tensorflow).get("keras")
    settled = {} if module is None else object.__getattribute__(module, "__dict__")
    return settled.get("_tfll_keras_version") == "keras_3" or settled.get("__name__") == f"{_MODULE}._tf_keras.keras"


def lead_to_keras_2(tensorflow: types.ModuleType) -> None:
    """Has `from tensorflow.keras.layers import Dense` find Keras 2, also where TensorFlow was loaded first.

    Seen in TensorFlow 2.21: `tensorflow.__path__` begins with the folder that has `keras`.
    """
    package = importlib.util.find_spec(KERAS)
    for place in (package and package.submodule_search_locations) or ():
        folder = os.path.join(place, "api", "_v2")
        if folder not in tensorflow.__path__:
            tensorflow.__path__.insert(0, folder)


def is_optimizer(value: Any) -> bool:
    """Whether something is an optimizer of Keras 3."""
    keras = loaded()
    return keras is not None and isinstance(value, keras.optimizers.Optimizer)


def is_model(value: Any) -> bool:
    """Whether something is a model of Keras 3."""
    keras = loaded()
    return keras is not None and isinstance(value, keras.Model)


def is_schedule(value: Any) -> bool:
    """Whether something is a learning-rate schedule of Keras 3."""
    keras = loaded()
    return keras is not None and isinstance(value, keras.optimizers.schedules.LearningRateSchedule)


def scales_loss(value: Any) -> bool:
    """Whether something is an optimizer of Keras 3 that multiplies the loss."""
    return is_optimizer(value) and (
        isinstance(value, loaded().optimizers.LossScaleOptimizer) or value.loss_scale_factor is not None
    )


def check_backend(owner: str) -> None:
    """Refuses Keras 3 that computes with another library; only where it is loaded.

    Raises:
      ValueError: it does; `owner` is who asks.
    """
    found = backend()
    if found != "tensorflow":
        problem, expected = "Keras 3 computes with another library", "TensorFlow"
        fix = "Set KERAS_BACKEND=tensorflow before keras is imported."
        raise ValueError(message(owner, problem, expected, f"KERAS_BACKEND={found}", fix))


def backend() -> str:
    """What Keras 3 computes with, such as "tensorflow"; only where it is loaded."""
    return sys.modules[_MODULE].backend.backend()


def variables_built_with(optimizer: Any) -> list:
    """The variables that an optimizer of Keras 3 was built with, empty before (`_trainable_variables`, Keras 3.15)."""
    return list(optimizer._trainable_variables)


def value_of(variable: Any) -> Any:
    """The variable of TensorFlow behind one of Keras 3; others are themselves (`Variable.value`, Keras 3.15)."""
    keras = loaded()
    return variable.value if keras is not None and isinstance(variable, keras.Variable) else variable


def prefix_of_slots(variable: Any) -> str:
    """What names of a variable's slots begin with (`BaseOptimizer.add_variable_from_reference`, Keras 3.15)."""
    if hasattr(variable, "path"):
        return f"{variable.path.replace('/', '_')}_"
    return f"{variable.name.replace('/', '_').replace(':', '_')}_"


def constrain(stand_in: Any, variable: Any) -> None:
    """Gives what stands for a variable of Keras 3 the same constraint (`tf.Variable.constraint`, Keras 3.15)."""
    stand_in._constraint = getattr(variable, "constraint", None)


def watch_optimizers(made: Callable[[Any], Any], updating: Callable[[Any, list], Any]) -> None:
    """As `training.watch_keras_optimizers`, for those of Keras 3, of which it loads nothing.

    Seen in Keras 3.15: `BaseOptimizer._backend_apply_gradients`, where all gradients are there.
    """

    def change(module):
        base = module.BaseOptimizer
        method, apply = base.__init__, base._backend_apply_gradients

        @functools.wraps(method)
        def __init__(self, *arguments, **keywords):
            method(self, *arguments, **keywords)
            made(self)

        @functools.wraps(apply)
        def told(self, grads, trainable_variables):
            updating(self, list(zip(grads, trainable_variables)))
            return apply(self, grads, trainable_variables)

        base.__init__, base._backend_apply_gradients = __init__, told

    if KERAS != _MODULE:
        when_loaded(_OPTIMIZER_MODULE, change)
