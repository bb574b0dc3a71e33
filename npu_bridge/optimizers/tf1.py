"""Optimizers for TF 1 graphs: `npu_bridge.optimizers.tf1.LAMB(0.001)` is a `tf.compat.v1.train.Optimizer`."""

from __future__ import annotations

from npu_bridge.optimizers.face_tf1 import Tf1Optimizer
from npu_bridge.optimizers.make import named_faces

globals().update(named_faces(Tf1Optimizer, __name__))
