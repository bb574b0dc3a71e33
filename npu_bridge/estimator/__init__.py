"""The documented face: `npu_bridge.estimator.npu` with its modules, and the operators beside it."""

from npu_bridge._lazy import attributes, submodules

__all__ = ["npu", "npu_aicore_ops", "npu_ops", "npu_unary_ops"]

__getattr__ = attributes(__name__, submodules(__name__, *__all__))
