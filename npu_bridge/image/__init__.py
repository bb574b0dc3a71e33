"""Operators on images."""

from npu_bridge._lazy import attributes, submodules

__all__ = ["image_ops"]

__getattr__ = attributes(__name__, submodules(__name__, *__all__))
