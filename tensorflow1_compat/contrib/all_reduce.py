"""`tf.contrib.all_reduce`: ways to sum tensors over devices."""

from tensorflow.python.distribute.v1.all_reduce import *
