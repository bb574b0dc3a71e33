"""Provides an optimizer with loss scaling: `npu_device.train.optimizer`."""

from npu_bridge.base.lazy import attributes, submodules

__all__ = ["optimizer"]

__getattr__ = attributes(__name__, submodules(__name__, "optimizer"))
