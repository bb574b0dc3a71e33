"""A second way to `npu_bridge.experimental`."""

from npu_bridge._lazy import attributes, submodules

__all__ = ["experimental"]

__getattr__ = attributes(__name__, submodules(__name__, *__all__))
