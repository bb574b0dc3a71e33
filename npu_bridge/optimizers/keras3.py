"""Optimizers for Keras 3 on TensorFlow: `npu_bridge.optimizers.keras3.LAMB(0.001)`. This module loads Keras 3."""

from __future__ import annotations

from npu_bridge.optimizers.keras3_optimizer import Keras3Optimizer
from npu_bridge.optimizers.make import make_optimizer_classes

globals().update(make_optimizer_classes(Keras3Optimizer, __name__))
