"""`tf.contrib.tensorboard.plugins`."""

from npu_bridge.tf1.contrib.tensorboard.plugins import projector
