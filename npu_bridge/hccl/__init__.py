"""Provides collectives as TensorFlow ops. As with `npu_bridge.estimator`, sessions read options after this import."""

from npu_bridge.base.lazy import import_module_or_object, lazy_getattr, places_of_submodules

__all__ = ["hccl_ops"]

__getattr__ = lazy_getattr(__name__, places_of_submodules(__name__, *__all__))

import_module_or_object("npu_bridge.estimator")
