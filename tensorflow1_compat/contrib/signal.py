"""`tf.contrib.signal`, which is now `tf.signal`."""

from tensorflow.compat.v1.signal import *
