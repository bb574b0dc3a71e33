"""`tf.contrib.tfprof`: it became `tf.profiler`."""

from npu_bridge.tf1.contrib.tfprof import model_analyzer, tfprof_logger
from npu_bridge.tf1.contrib.tfprof.context import ProfileContext
