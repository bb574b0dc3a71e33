"""`tf.keras.mixed_precision.experimental`: policies of Keras layers under their experimental names."""

from __future__ import annotations

import tensorflow as tf

from npu_bridge.base.tf_internals.contrib import keras_loss_scale_optimizer

global_policy, set_policy = tf.keras.mixed_precision.global_policy, tf.keras.mixed_precision.set_global_policy


class Policy(tf.keras.mixed_precision.Policy):
    """A dtype policy of Keras layers.

    Args:
      name: "float32", "mixed_float16" or "mixed_bfloat16".
      loss_scale: "auto", "dynamic", a number or None; only kept as an attribute: see `LossScaleOptimizer`.
    """

    def __init__(self, name, loss_scale="auto"):
        super().__init__(name)
        self.loss_scale = loss_scale


def LossScaleOptimizer(optimizer, loss_scale="dynamic"):
    """Adds loss scaling to a Keras optimizer; `loss_scale` is "dynamic", a constant number or a tf.LossScale."""
    if hasattr(loss_scale, "initial_loss_scale"):
        loss_scale = "dynamic"
    if loss_scale == "dynamic":
        return keras_loss_scale_optimizer()(optimizer)
    return keras_loss_scale_optimizer()(optimizer, dynamic=False, initial_scale=float(loss_scale))
