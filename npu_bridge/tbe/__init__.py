"""Operators that the NPU stack compiles on demand, computed by TensorFlow."""

from npu_bridge._lazy import attributes, submodules

__all__ = ["npu_cube_ops", "npu_vector_ops"]

__getattr__ = attributes(__name__, submodules(__name__, *__all__))
