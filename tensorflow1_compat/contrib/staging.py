"""`tf.contrib.staging`."""

from tensorflow.python.ops.data_flow_ops import StagingArea
