"""Optimizers for Keras 2.15: `npu_bridge.optimizers.keras.LAMB(0.001)`. See also `keras_legacy`."""

from __future__ import annotations

from npu_bridge.optimizers import keras_legacy
from npu_bridge.optimizers.keras_optimizer import KerasOptimizer
from npu_bridge.optimizers.make import make_optimizer_classes

_made = make_optimizer_classes(KerasOptimizer, __name__)
for _name, _kind in _made.items():
    _kind.legacy_kind = getattr(keras_legacy, _name)  # replaces it where Keras trains only with legacy optimizers
globals().update(_made)
