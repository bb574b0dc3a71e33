"""The dtypes of the native interface, as the numbers that TensorFlow gives them: `DT_FLOAT`, `DT_HALF`, ..."""

from tensorflow.core.framework import types_pb2

globals().update(types_pb2.DataType.items())
