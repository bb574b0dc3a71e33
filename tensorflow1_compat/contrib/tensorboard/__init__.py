"""`tf.contrib.tensorboard`."""

from tensorflow1_compat.contrib.tensorboard import plugins
