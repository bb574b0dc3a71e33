"""`tf.contrib.tfprof.tfprof_logger`, which is now part of the profiler of TensorFlow."""

from tensorflow.python.profiler.tfprof_logger import *
from tensorflow.python.profiler.tfprof_logger import write_op_log
