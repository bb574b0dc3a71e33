"""Optimizers for TF 1 graphs: `npu_bridge.optimizers.tf1.LAMB(0.001)` is a `tf.compat.v1.train.Optimizer`."""

from __future__ import annotations

from npu_bridge.optimizers.make import make_optimizer_classes
from npu_bridge.optimizers.tf1_optimizer import Tf1Optimizer

globals().update(make_optimizer_classes(Tf1Optimizer, __name__))
