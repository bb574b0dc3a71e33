"""Chooses the wrapper for a Keras optimizer by its generation, and refuses what cannot be wrapped."""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from npu_bridge.base.errors import message
from npu_bridge.gradients.inner import is_distributed
from npu_bridge.gradients.keras.current import CurrentLossScaleOptimizer, CurrentPipelineOptimizer
from npu_bridge.gradients.keras.legacy import LegacyLossScaleOptimizer, LegacyPipelineOptimizer
from npu_bridge.gradients.keras.settings import KerasSettings
from npu_bridge.gradients.keras.shared import PipelineMixin

PIPELINE_OPTIMIZERS = (LegacyPipelineOptimizer, CurrentPipelineOptimizer)
SCALING_OPTIMIZERS = (LegacyLossScaleOptimizer, CurrentLossScaleOptimizer)


def keras_optimizer(optimizer: Any, settings: KerasSettings, owner: str) -> Any:
    """Puts a pipeline around a Keras optimizer.

    Returns:
      An optimizer of the same generation. With loss scaling it is a `tf.keras.mixed_precision.LossScaleOptimizer`
      too, so that Keras adds no second one.
    Raises:
      TypeError: `optimizer` is none of Keras.
      ValueError: it averages gradients or scales the loss itself.
    """
    is_legacy = isinstance(optimizer, tf.keras.optimizers.legacy.Optimizer)
    if not is_legacy and not isinstance(optimizer, tf.keras.optimizers.Optimizer):
        problem = "that is not a Keras optimizer"
        expected = "a tf.keras.optimizers.Optimizer or a tf.keras.optimizers.legacy.Optimizer"
        got = f"{optimizer!r} of type {type(optimizer).__name__}"
        fix = "Pass the optimizer object itself; one of tf.compat.v1.train goes to NPUDistributedOptimizer."
        raise TypeError(message(owner, problem, expected, got, fix))
    _check_nesting(optimizer, settings, owner)
    return _class_of(is_legacy, settings.manager)(optimizer, settings)


def keras_optimizer_from_config(config: dict, custom_objects: dict | None = None) -> Any:
    """Makes an optimizer from what its `get_config` returned, whatever its class was."""
    made_by = _class_of(config.get("is_legacy_optimizer", True), config["manager"])
    return made_by.from_config(config, custom_objects)


def _class_of(is_legacy, manager):
    legacy, current = PIPELINE_OPTIMIZERS if manager is None else SCALING_OPTIMIZERS
    return legacy if is_legacy else current


def _check_nesting(optimizer, settings, owner):
    if isinstance(optimizer, tf.keras.mixed_precision.LossScaleOptimizer):
        problem = "loss scaling must be outside the reduction, and happen once"
        expected, got = "the optimizer that updates the variables", type(optimizer).__name__
        fix = (
            "Pass that, and a loss_scale_manager to npu_keras_optimizer; or write "
            "LossScaleOptimizer(npu_keras_optimizer(opt))."
        )
        raise ValueError(message(owner, problem, expected, got, fix))
    if isinstance(optimizer, PipelineMixin) or (settings.is_distributed and is_distributed(optimizer)):
        problem, expected = "the gradients would be averaged over the ranks twice", "one distributed optimizer"
        is_ours = isinstance(optimizer, PipelineMixin)
        got = repr(optimizer).partition("(")[0] if is_ours else type(optimizer).__name__
        got, fix = f"{got}, which is one", "Pass the optimizer that it wraps."
        raise ValueError(message(owner, problem, expected, got, fix))
