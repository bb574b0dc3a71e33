"""`tf.contrib.all_reduce`: algorithms that sum tensors over devices."""

from tensorflow.python.distribute.v1.all_reduce import *
