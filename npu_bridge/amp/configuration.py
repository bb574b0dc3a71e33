"""Implements `configure`: applies a level to a model, an optimizer, a configuration or a session."""

from __future__ import annotations

import contextlib
import logging
import re
from collections.abc import Iterator
from typing import Any

import tensorflow as tf

from npu_bridge.amp.casts import registered_casts
from npu_bridge.amp.loss_scale import DynamicLossScaleManager, check_apex_arguments
from npu_bridge.base.arguments import check_count
from npu_bridge.base.errors import message, say_once, shown, unknown_keyword
from npu_bridge.base.tf_internals import keras3
from npu_bridge.estimator.npu.npu_helpers import npu_keras_optimizer
from npu_bridge.estimator.npu.npu_loss_scale_manager import FixedLossScaleManager, LossScaleManager
from npu_bridge.estimator.npu.npu_optimizer import NPUOptimizer
from npu_bridge.gradients.inner.stand_ins import check_takes_stand_ins
from npu_bridge.options import read_session_config, with_optimizer_entry
from npu_bridge.session.precision.functions import apply_policy_to_functions, apply_precision_to_model
from npu_bridge.session.precision.keras_models import ModelDtypes, change_dtypes
from npu_bridge.session.precision.levels import (
    BATCH_NORM_TYPES,
    DYNAMIC,
    LevelProperties,
    level_properties,
    read_low_dtype,
)
from npu_bridge.session.precision.narrow_variables import get_variable_stored_in
from npu_bridge.session.precision.op_lists import OpLists
from npu_bridge.session.precision.opt_level import LossScale, OptLevel
from npu_bridge.session.precision.policy import Precision

_OWNER = "amp.configure"
# Names of the variables of batch normalisation in TensorFlow's layers.
_BATCH_NORM_VARIABLE = re.compile(r"(^|/)(gamma|beta|moving_mean|moving_variance)$")
# Arguments of `DynamicLossScaleManager.apex` by the names used in scripts of APEX.
_SCALE_ARGUMENTS = {
    "dynamic_init_scale": "init_scale",
    "scale_growth_factor": "growth_factor",
    "scale_backoff_factor": "backoff_factor",
    "scale_window": "scale_window",
    "min_loss_scale": "min_loss_scale",
    "max_loss_scale": "max_loss_scale",
}
_OPTIMIZER_ARGUMENTS = (
    *("is_distributed", "is_tailing_optimization", "stages", "wire"),
    *("gradient_split_groups", "combine_grad", "check_combined_tensors"),
)
_OVERRIDES = (
    *LevelProperties._fields,
    *("low_dtype", "num_losses", "user_cast_preferred"),
    *_SCALE_ARGUMENTS,
    *_OPTIMIZER_ARGUMENTS,
)


class Configuration:
    """The result of `configure`: the properties, model and optimizer of a training at a level.

    Attributes:
      level: "O0" to "O3".
      properties: the level's properties, with the script's replacements.
      low_dtype: "float16" or "bfloat16".
      model: the Keras model to compile and train, or None.
      optimizer: the optimizer to train with, or None.
      loss_scale_managers: a manager for each loss, made by `wrap`; empty if the loss scale is 1.
    """

    def __init__(
        self,
        level: str,
        properties: LevelProperties,
        low_dtype: str,
        num_losses: int = 1,
        scale_arguments: dict[str, Any] | None = None,
        optimizer_arguments: dict[str, Any] | None = None,
    ):
        self.level, self.properties, self.low_dtype = level, properties, low_dtype
        self.model: Any = None
        self.optimizer: Any = None
        self.loss_scale_managers: list[LossScaleManager] = []
        self._num_losses = num_losses
        self._scale_arguments = scale_arguments or {}
        self._optimizer_arguments = optimizer_arguments or {}
        self._casts = registered_casts()

    @property
    def op_lists(self) -> OpLists:
        """The operator types that deviate from a session's precision mode: those of the level, and registered types."""
        lists = self.properties.op_lists()
        if self.precision_mode == "origin":
            return lists
        if self.precision_mode == "fp16":  # the norm that decides about gradients is a sum of squares
            lists = lists.with_float("L2Loss")
        registered = self._casts.op_lists
        aborting = registered.half.intersection(BATCH_NORM_TYPES) if self.low_dtype == "bfloat16" else ()
        if aborting:  # would lower its parameters too; without a kernel for them TensorFlow ends the process
            got = f"half_function({min(aborting)!r})"
            fix = "Leave the call out: O3 itself lowers batch normalisation."
            problem = "batch normalisation cannot be forced into bfloat16"
            raise ValueError(message(_OWNER, problem, "half_function for other types", got, fix))
        return lists.with_half(*registered.half).with_float(*registered.floats).with_promote(*registered.promote)

    @property
    def precision_mode(self) -> str:
        """The value of the option `precision_mode_v2` for this level."""
        return self.properties.precision_mode(self.low_dtype)

    def options(self, folder: str | None = None) -> dict[str, str]:
        """Returns the level as arguments of `NPURunConfig`; the session's `parameter_map` uses the same names.

        Args:
          folder: the folder for a file with the lists of operator types; None writes no file. A model built inside
            `building` needs no file, because its graph holds the lists.
        """
        level = OptLevel(self.level, self.precision_mode, self.op_lists, LossScale(None, {}))
        return level.options(folder)

    def session_config(self, config: Any = None) -> tf.compat.v1.ConfigProto:
        """Returns a copy of a ConfigProto, by default of an empty one, that asks for the level's precision."""
        return with_optimizer_entry(config, self.options())

    @contextlib.contextmanager
    def building(self) -> Iterator[None]:
        """Applies the level's lists of operators and its variable dtypes to the TF 1 model built inside the context.

        Variables of `tf.get_variable` and `tf.layers` have 16 bits if the level has no master weights. With
        `keep_batchnorm_fp32`, variables named gamma, beta, moving_mean and moving_variance keep 32 bits.
        """
        self.op_lists.register()
        if not self._has_narrow_variables:
            yield
            return
        stays = _BATCH_NORM_VARIABLE.search if self.properties.keep_batchnorm_fp32 else lambda name: False
        with get_variable_stored_in(self.low_dtype, lambda name: bool(stays(name))):
            yield

    @contextlib.contextmanager
    def computing(self) -> Iterator[None]:
        """Makes functions that this thread calls follow O1's lists of operators; does nothing for other levels.

        Use it around calls of your own `tf.function`; `fit` of the model follows the lists anyway.
        """
        precision = self._precision()
        if not self.properties.patch_functions or precision.low_dtype is None:
            yield
            return
        with apply_policy_to_functions(precision, precision.configured):
            yield

    def cast(self, model: Any) -> Any:
        """Casts a Keras model to the level's dtypes.

        Returns:
          A new model with the same weights, or `model` if the level changes no dtype.
        Raises:
          TypeError, ValueError: `model` is not a model of Keras 2, or cannot be cast.
        """
        _reject_keras3(model)
        if self._casts.layers_alone and self.properties.patch_functions:
            names = ", ".join(self._casts.layers_alone)
            say_once(
                logging.WARNING,
                f"{_OWNER}: {self.level} lowers the precision of operators, not of layers. Expected operator types; "
                f"got the layers {names}. Register the types of their operators, such as MatMul.",
            )
        if self.properties.cast_model_type is None:
            outputs = self.properties.cast_model_outputs
            self.model = model if outputs is None else change_dtypes(model, ModelDtypes(outputs=outputs), _OWNER)
            precision = self._precision()
            if precision.low_dtype is not None:
                apply_precision_to_model(self.model, precision)
            return self.model
        dtypes = {"half": self.low_dtype, "float": "float32"}
        layers = (
            {name: dtypes[kind] for name, kind in self._casts.layers.items()} if self.properties.casts_model else {}
        )
        self.model = change_dtypes(
            model,
            ModelDtypes(
                compute=self.properties.cast_model_type,
                variables=self.low_dtype if self._has_narrow_variables else "float32",
                keeps_batchnorm=self.properties.keep_batchnorm_fp32 is not False,
                outputs=self.properties.cast_model_outputs,
                of_layers=layers,
            ),
            _OWNER,
        )
        return self.model

    def wrap(self, optimizer: Any) -> Any:
        """Adds the level's loss scale to an optimizer, in the graph that is being built.

        Args:
          optimizer: a `tf.compat.v1.train.Optimizer` or a Keras optimizer.
        Returns:
          An `NPUOptimizer`, or the result of `npu_keras_optimizer`. Both skip a step that overflows, even with a fixed
          scale.
        Raises:
          TypeError, ValueError: `optimizer` is not an optimizer, or is one of Keras 3, already scales the loss, or
            cannot train the level's 16-bit variables.
        """
        _reject_keras3(optimizer)
        if self._has_narrow_variables:
            check_takes_stand_ins(optimizer, f"{_OWNER}: {self.level}")
        self.loss_scale_managers = [manager for manager in map(self._new_manager, range(self._num_losses)) if manager]
        managers: Any = self.loss_scale_managers
        manager = managers if len(managers) > 1 else managers[0] if managers else None
        arguments = {"is_loss_scale": manager is not None, **self._optimizer_arguments}
        is_keras = isinstance(optimizer, (tf.keras.optimizers.Optimizer, tf.keras.optimizers.legacy.Optimizer))
        make = npu_keras_optimizer if is_keras else NPUOptimizer
        self.optimizer = make(optimizer, manager, **arguments)
        return self.optimizer

    @property
    def _has_narrow_variables(self) -> bool:
        return self.properties.casts_model and not self.properties.master_weights

    def _new_manager(self, number: int) -> LossScaleManager | None:
        if self.properties.loss_scale == DYNAMIC:
            arguments = {_SCALE_ARGUMENTS[name]: value for name, value in self._scale_arguments.items()}
            return DynamicLossScaleManager.apex(**arguments)
        return None if self.properties.loss_scale == 1.0 else FixedLossScaleManager(self.properties.loss_scale)

    def _precision(self) -> Precision:
        return Precision(read_session_config(self.session_config()), self.op_lists)


def _reject_keras3(part: Any) -> None:
    if keras3.is_model(part) or keras3.is_optimizer(part):
        fix = "Call keras.mixed_precision.set_global_policy before you make the model, and npu_keras_optimizer"
        got, fix = f"{type(part).__name__} of Keras 3", f"{fix} with a loss-scale manager."
        raise TypeError(message(_OWNER, "levels are for Keras 2", "a model or an optimizer of tf.keras", got, fix))


def configure(level: str = "O1", optimizer: Any = None, model: Any = None, **overrides: Any) -> Configuration:
    """Configures mixed precision by a level: the dtypes of a model, and the loss scale of an optimizer.

    Args:
      level: "O0" is float32; "O1" lowers operators by lists; "O2" casts the model except batch normalisation and keeps
        float32 master weights; "O3" casts everything.
      optimizer: a `tf.compat.v1.train.Optimizer` or a Keras optimizer; None to `wrap` one later, in a model function.
      model: a Keras model, built or not; None for a TF 1 graph, which is built inside `building`.
      **overrides: values in place of the level's own; None keeps the level's value: `cast_model_type`,
        `patch_functions`, `keep_batchnorm_fp32`, `master_weights`, `loss_scale`, `cast_model_outputs`; and
        low_dtype: "float16" or "bfloat16", the dtype to which O1 lowers; other levels use `cast_model_type`.
        num_losses: number of losses that have their own scale.
        dynamic_init_scale, scale_growth_factor, scale_backoff_factor, scale_window, min_loss_scale, max_loss_scale:
          arguments of the dynamic loss scale; they do not change a fixed loss scale.
        user_cast_preferred: only for O1, and only True: registered casts always replace entries of the level's lists.
        is_distributed, is_tailing_optimization, stages, wire, gradient_split_groups, combine_grad,
          check_combined_tensors: as in `NPUOptimizer`; a Keras optimizer averages unless is_distributed is False.
    Returns:
      A `Configuration`, with the new `optimizer` and `model`.
    Raises:
      TypeError: an override does not exist, or has the wrong type.
      ValueError: the level does not exist, a value is not allowed, or values contradict each other.
    Example:
      >>> levels = amp.configure("O2", tf.keras.optimizers.Adam(), model, loss_scale=128.0)
      >>> levels.model.compile(levels.optimizer, "mse")
    """
    for name in overrides:
        if name not in _OVERRIDES:
            raise unknown_keyword(_OWNER, name, _OVERRIDES)
    given = {name: value for name, value in overrides.items() if value is not None}
    scale_arguments = {name: given.pop(name) for name in list(given) if name in _SCALE_ARGUMENTS}
    check_apex_arguments(_OWNER, scale_arguments, "dynamic_init_scale")
    optimizer_arguments = {name: given.pop(name) for name in list(given) if name in _OPTIMIZER_ARGUMENTS}
    num_losses = check_count(_OWNER, "num_losses", given.pop("num_losses", 1))
    user_cast = given.pop("user_cast_preferred", None)
    asked = given.pop("low_dtype", None)
    properties = level_properties(_OWNER, level, given)
    if user_cast is not None:
        _check_user_cast(level, properties, user_cast)
    low_dtype = read_low_dtype(_OWNER, level, properties, asked)
    made = Configuration(level, properties, low_dtype, num_losses, scale_arguments, optimizer_arguments)
    if model is not None:
        made.cast(model)
    if optimizer is not None:
        made.wrap(optimizer)
    return made


def _check_user_cast(level: str, properties: LevelProperties, value: Any) -> None:
    if not properties.patch_functions:
        problem = f"user_cast_preferred does not fit {level}, which has no lists of operators"
        raise ValueError(message(_OWNER, problem, "no user_cast_preferred", shown(value), "Leave it out, or use O1."))
    if value is not True:
        problem = "user_cast_preferred=False would cast twice, by the list and by the registered cast"
        raise ValueError(message(_OWNER, problem, "True", shown(value), "Leave it out to cast operators once."))
