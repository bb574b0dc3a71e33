"""Optimizers for Keras 3 on TensorFlow: `npu_bridge.optimizers.keras3.LAMB(0.001)`. This module loads Keras 3."""

from __future__ import annotations

from npu_bridge.optimizers.keras3_optimizer import Keras3Optimizer
from npu_bridge.optimizers.make import named_optimizers

globals().update(named_optimizers(Keras3Optimizer, __name__))
