"""Optimizers for `tf.keras.optimizers.legacy`: `npu_bridge.optimizers.keras_legacy.LAMB(0.001)`."""

from __future__ import annotations

from npu_bridge.optimizers.face_keras import KerasLegacyOptimizer
from npu_bridge.optimizers.make import named_faces

globals().update(named_faces(KerasLegacyOptimizer, __name__))
