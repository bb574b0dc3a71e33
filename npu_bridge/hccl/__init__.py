"""Collectives as TensorFlow ops."""

from npu_bridge._lazy import attributes, submodules

__all__ = ["hccl_ops"]

__getattr__ = attributes(__name__, submodules(__name__, *__all__))
