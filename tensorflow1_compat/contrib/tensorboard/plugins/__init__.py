"""`tf.contrib.tensorboard.plugins`."""

from tensorflow1_compat.contrib.tensorboard.plugins import projector
