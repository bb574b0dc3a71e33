"""`tf.contrib.tensorboard`."""

from npu_bridge.tf1.contrib.tensorboard import plugins
