"""`tf.contrib.tfprof.tfprof_logger`."""

from tensorflow.python.profiler.tfprof_logger import *
from tensorflow.python.profiler.tfprof_logger import write_op_log
