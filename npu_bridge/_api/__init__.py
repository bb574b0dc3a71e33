"""A second way to `npu_bridge.experimental`."""

from npu_bridge._lazy import attributes

__all__ = ["experimental"]

__getattr__ = attributes(__name__, {"experimental": "npu_bridge.experimental"})
