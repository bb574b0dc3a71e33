"""Defines the dtypes of the native interface (`DT_FLOAT`, `DT_HALF`, ...) as TensorFlow's numbers."""

from tensorflow.core.framework import types_pb2

globals().update(types_pb2.DataType.items())
