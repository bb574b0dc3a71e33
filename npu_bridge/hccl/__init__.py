"""Provides collectives as TensorFlow ops. As with `npu_bridge.estimator`, sessions read options after this import."""

from npu_bridge.base.lazy import attributes, found_at, submodules

__all__ = ["hccl_ops"]

__getattr__ = attributes(__name__, submodules(__name__, *__all__))

found_at("npu_bridge.estimator")
