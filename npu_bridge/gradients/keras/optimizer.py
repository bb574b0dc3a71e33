"""Chooses the wrapper for a Keras optimizer by its generation, and rejects optimizers that cannot be wrapped."""

from __future__ import annotations

from typing import Any

from npu_bridge.base.errors import message
from npu_bridge.base.own_tensorflow import tf
from npu_bridge.base.tf_internals import keras3, training
from npu_bridge.gradients.inner.interface import is_distributed
from npu_bridge.gradients.keras.current import CurrentLossScaleOptimizer, CurrentPipelineOptimizer
from npu_bridge.gradients.keras.legacy import LegacyLossScaleOptimizer, LegacyPipelineOptimizer
from npu_bridge.gradients.keras.settings import KerasSettings
from npu_bridge.gradients.keras.shared import PipelineMixin

# By generation: (class without loss scaling, class with loss scaling). Classes of Keras 3 are added when it is loaded.
_CLASSES: dict[str, tuple[type, type]] = {
    "legacy": (LegacyPipelineOptimizer, LegacyLossScaleOptimizer),
    "current": (CurrentPipelineOptimizer, CurrentLossScaleOptimizer),
}


# Settings that only the current generation has; the first two change results.
_CHANGING_RESULTS = ("weight_decay", "use_ema")
_ONLY_IN_CURRENT = (*_CHANGING_RESULTS, "ema_momentum", "ema_overwrite_frequency", "jit_compile", "is_legacy_optimizer")


def wrap_keras_optimizer(optimizer: Any, settings: KerasSettings, owner: str) -> Any:
    """Wraps a Keras optimizer in a pipeline.

    Returns:
      An optimizer of the same generation. Without TensorFlow 2 behaviour, it is the legacy optimizer of the same kind,
      if Keras has one, because Keras makes this conversion, too. With loss scaling, the result is also an instance of
      `LossScaleOptimizer` of `tf.keras.mixed_precision`, or of `keras.optimizers` in Keras 3, so that Keras adds no
      second loss scaling.
    Raises:
      TypeError: `optimizer` is not a Keras optimizer.
      ValueError: `optimizer` itself averages gradients or scales the loss, or Keras 3 does not run on TensorFlow.
    """
    generation = _keras_generation_of(optimizer)
    if generation is None:
        problem = "the argument is not a Keras optimizer"
        expected = "a tf.keras.optimizers.Optimizer or a tf.keras.optimizers.legacy.Optimizer"
        got = f"{optimizer!r} of type {type(optimizer).__name__}"
        fix = "Pass the optimizer object itself. Wrap optimizers of tf.compat.v1.train in NPUDistributedOptimizer."
        raise TypeError(message(owner, problem, expected, got, fix))
    if generation == "keras3":
        keras3.check_backend(owner)
    _check_nesting(optimizer, settings, owner)
    if generation == "current" and training.compile_converts_optimizers():
        legacy = _legacy_equivalent(optimizer)
        generation, optimizer = ("legacy", legacy) if legacy is not None else (generation, optimizer)
    return _wrapper_class(generation, settings.manager)(optimizer, settings)


def keras_optimizer_from_config(config: dict, custom_objects: dict | None = None) -> Any:
    """Makes an optimizer of any class of this package from the result of its `get_config`."""
    generation = config.get("generation") or ("legacy" if config.get("is_legacy_optimizer", True) else "current")
    return _wrapper_class(generation, config["manager"]).from_config(config, custom_objects)


def _keras_generation_of(optimizer):
    if isinstance(optimizer, tf.keras.optimizers.legacy.Optimizer):
        return "legacy"
    if isinstance(optimizer, tf.keras.optimizers.Optimizer):
        return "current"
    return "keras3" if keras3.is_optimizer(optimizer) else None


def _legacy_equivalent(optimizer):
    """Returns a legacy optimizer with the same settings, or None if Keras has no legacy optimizer of this kind."""
    kind = vars(type(optimizer)).get("legacy_kind")  # only of this package's own class, not of a subclass
    if kind is not None:
        return kind.from_config(training.config_before_training(optimizer))
    name = type(optimizer).__name__
    kind = getattr(tf.keras.optimizers.legacy, name, None)
    if kind is None or getattr(tf.keras.optimizers, name, None) is not type(optimizer):
        return None
    config = training.config_before_training(optimizer)
    lost = [key for key in _ONLY_IN_CURRENT if config.pop(key, None) and key in _CHANGING_RESULTS]
    return None if lost else kind.from_config(config)


def _wrapper_class(generation, manager):
    if generation not in _CLASSES:
        _register_keras3(None)
    return _CLASSES[generation][manager is not None]


def _check_nesting(optimizer, settings, owner):
    if isinstance(optimizer, tf.keras.mixed_precision.LossScaleOptimizer) or keras3.is_loss_scaling_optimizer(
        optimizer
    ):
        problem = "loss scaling must be outside the reduction, and happen once"
        expected, got = "the optimizer that updates the variables", type(optimizer).__name__
        also = "" if keras3.is_optimizer(optimizer) else "; or write LossScaleOptimizer(npu_keras_optimizer(opt))"
        fix = f"Pass the inner optimizer, and a loss_scale_manager to npu_keras_optimizer{also}."
        raise ValueError(message(owner, problem, expected, got, fix))
    if isinstance(optimizer, PipelineMixin) or (settings.is_distributed and is_distributed(optimizer)):
        problem, expected = "the gradients would be averaged over the ranks twice", "one distributed optimizer"
        is_ours = isinstance(optimizer, PipelineMixin)
        got = repr(optimizer).partition("(")[0] if is_ours else type(optimizer).__name__
        got, fix = f"{got}, which is distributed already", f"Pass the optimizer that {got} wraps."
        raise ValueError(message(owner, problem, expected, got, fix))


def _register_keras3(_module):
    if keras3.backend() == "tensorflow":
        from npu_bridge.gradients.keras.keras3 import Keras3LossScaleOptimizer, Keras3PipelineOptimizer

        _CLASSES["keras3"] = (Keras3PipelineOptimizer, Keras3LossScaleOptimizer)


keras3.call_when_keras3_loaded(_register_keras3)  # at once, because load_model of Keras 3 knows registered classes only
