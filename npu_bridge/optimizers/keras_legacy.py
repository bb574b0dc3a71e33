"""Optimizers for `tf.keras.optimizers.legacy`: `npu_bridge.optimizers.keras_legacy.LAMB(0.001)`."""

from __future__ import annotations

from npu_bridge.optimizers.keras_optimizer import KerasLegacyOptimizer
from npu_bridge.optimizers.make import make_optimizer_classes

globals().update(make_optimizer_classes(KerasLegacyOptimizer, __name__))
