"""Collectives as TensorFlow ops. As with `npu_bridge.estimator`, sessions read options once this is imported."""

from npu_bridge.base.lazy import attributes, submodules
from npu_bridge.estimator.npu.npu_session import decorate_sessions

__all__ = ["hccl_ops"]

__getattr__ = attributes(__name__, submodules(__name__, *__all__))

decorate_sessions()
