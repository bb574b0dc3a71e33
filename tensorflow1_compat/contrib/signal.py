"""`tf.contrib.signal`: it became `tf.signal`."""

from tensorflow.compat.v1.signal import *
