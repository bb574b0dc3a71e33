"""Optimizers for Keras 2.15: `npu_bridge.optimizers.keras.LAMB(0.001)`; `keras_legacy` has those of the other kind."""

from __future__ import annotations

from npu_bridge.optimizers.keras_optimizer import KerasOptimizer
from npu_bridge.optimizers.make import named_optimizers

globals().update(named_optimizers(KerasOptimizer, __name__))
