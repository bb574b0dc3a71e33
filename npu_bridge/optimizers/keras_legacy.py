"""Optimizers for `tf.keras.optimizers.legacy`: `npu_bridge.optimizers.keras_legacy.LAMB(0.001)`."""

from __future__ import annotations

from npu_bridge.optimizers.keras_optimizer import KerasLegacyOptimizer
from npu_bridge.optimizers.make import named_optimizers

globals().update(named_optimizers(KerasLegacyOptimizer, __name__))
