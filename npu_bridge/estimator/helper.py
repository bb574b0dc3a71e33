"""Provides `get_gen_ops`, which gives access to the raw operators."""

from __future__ import annotations

from typing import Any

from npu_bridge.estimator import npu_aicore_ops, npu_cpu_ops, npu_cube_ops, npu_ops, npu_unary_ops, npu_vector_ops
from npu_bridge.operators import activations, dropping
from npu_bridge.operators.unavailable import unavailable_function

__all__ = ["get_gen_ops"]

_MODULES = (npu_ops, npu_unary_ops, npu_aicore_ops, npu_cpu_ops, npu_cube_ops, npu_vector_ops)
_OTHER_NAMES = {
    "drop_out_do_mask": dropping.apply_packed_mask,
    "drop_out_do_mask_v3": dropping.apply_byte_mask,
    "drop_out_gen_mask": dropping.draw_packed_mask,
    "drop_out_gen_mask_v3": dropping.draw_byte_mask,
    "fast_gelu_grad": activations.fast_gelu_grad,
    "lars": npu_ops.LARS,
    "lars_v2": npu_ops.LARSV2,
    "npu_init": npu_ops.NPUInit,
    "npu_shutdown": npu_ops.NPUShutdown,
    "random_choice_with_mask": npu_cpu_ops.randomchoicewithmask,
    "non_zero": npu_aicore_ops.nonzero,
    "non_zero_with_value": npu_aicore_ops.nonzerowithvalue,
    "p_relu": npu_aicore_ops.prelu,
}
_FLOAT_STATUS = ("npu_alloc_float_status", "npu_clear_float_status", "npu_get_float_status")


def get_gen_ops() -> Any:
    """Returns an object with the raw operators as attributes, in snake case.

    The attributes of supported operators are this package's functions for these operators. All other attributes are
    functions that raise NotImplementedError when called.
    """
    return _RawOperators()


class _RawOperators:
    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        if name in _OTHER_NAMES:
            return _OTHER_NAMES[name]
        for module in _MODULES:
            if name in module.__all__:
                return getattr(module, name)
        if name in _FLOAT_STATUS:
            return unavailable_function(
                name,
                "the overflow register of a device",
                "Use NPULossScaleOptimizer, which skips steps with an overflow, or tf.math.is_finite.",
            )
        return unavailable_function(name, "a kernel of a device", "Look for an operator in docs/operators.md.")
