"""Finds the family of an optimizer, and wraps it in the `InnerOptimizer` of that family.

TensorFlow 2.15 has three families: TF 1 optimizers, Keras legacy optimizers (such as those of tensorflow-addons) and
Keras optimizers. Optimizers of Keras 3 are the fourth family.
"""

from __future__ import annotations

from typing import Any

from npu_bridge.base.own_tensorflow import tf
from npu_bridge.base.tf_internals import keras3
from npu_bridge.gradients.inner.interface import InnerOptimizer, Tf1Optimizer
from npu_bridge.gradients.keras.inner import Keras3Optimizer, KerasLegacyOptimizer, KerasOptimizer


def adapt_optimizer(
    optimizer: Any, owner: str, applies_updates: bool = True, accepts_keras3: bool = False, saved_as: Any = None
) -> InnerOptimizer:
    """Wraps an optimizer in the `InnerOptimizer` of its family.

    Args:
      optimizer: an optimizer of any family.
      owner: name of the class that received the optimizer, for the error message.
      applies_updates: False if another object calls the optimizer's `apply_gradients`.
      accepts_keras3: whether optimizers of Keras 3 are accepted.
      saved_as: the wrapper that object-based checkpoints save in place of the optimizer.
    Raises:
      TypeError: `optimizer` is of no known family, or of Keras 3 without `accepts_keras3`.
    """
    # An optimizer with stand-ins of its own needs the original variables.
    updates_16_bit = not applies_updates or getattr(type(optimizer), "has_stand_ins", False)
    if isinstance(optimizer, tf.compat.v1.train.Optimizer):
        return Tf1Optimizer(optimizer, updates_16_bit, saved_as)
    if isinstance(optimizer, tf.keras.optimizers.legacy.Optimizer):
        return KerasLegacyOptimizer(optimizer, updates_16_bit, saved_as)
    if isinstance(optimizer, tf.keras.optimizers.Optimizer):
        return KerasOptimizer(optimizer, updates_16_bit, saved_as)
    if accepts_keras3:
        return Keras3Optimizer(optimizer, updates_16_bit, saved_as)
    is_class = isinstance(optimizer, type)
    fix = f"Write {optimizer.__name__}(...)." if is_class else "Pass the optimizer object itself."
    if keras3.is_optimizer(optimizer):
        fix = "For optimizers of Keras 3, use npu_keras_optimizer(...)."
    raise TypeError(
        f"{owner}: the argument is not an optimizer. Expected a tf.compat.v1.train.Optimizer, a "
        f"tf.keras.optimizers.legacy.Optimizer or a tf.keras.optimizers.Optimizer; got {optimizer!r} of type "
        f"{type(optimizer).__name__}. {fix}"
    )
