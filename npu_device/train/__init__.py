"""Provides an optimizer with loss scaling: `npu_device.train.optimizer`."""

from npu_bridge.base.lazy import lazy_getattr, places_of_submodules

__all__ = ["optimizer"]

__getattr__ = lazy_getattr(__name__, places_of_submodules(__name__, "optimizer"))
