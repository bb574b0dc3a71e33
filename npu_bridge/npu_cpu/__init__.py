"""Operators that the NPU stack runs on the device's processor, computed by TensorFlow."""

from npu_bridge._lazy import attributes, submodules

__all__ = ["lru_cache", "npu_cpu_ops"]

__getattr__ = attributes(__name__, submodules(__name__, *__all__))
