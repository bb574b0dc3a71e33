"""`tf.contrib.staging`: `StagingArea`."""

from tensorflow.python.ops.data_flow_ops import StagingArea
