"""`tf.contrib.tfprof`, which is now `tf.profiler`."""

from tensorflow1_compat.contrib.tfprof import model_analyzer, tfprof_logger
from tensorflow1_compat.contrib.tfprof.context import ProfileContext
