"""`tf.contrib.tensorboard`: settings for plugins of TensorBoard."""

from tensorflow1_compat.contrib.tensorboard import plugins
