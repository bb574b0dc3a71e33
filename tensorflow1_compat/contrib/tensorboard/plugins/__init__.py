"""`tf.contrib.tensorboard.plugins`: settings for the embedding projector."""

from tensorflow1_compat.contrib.tensorboard.plugins import projector
