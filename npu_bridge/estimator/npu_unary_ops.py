"""Provides operators that take one tensor."""

from __future__ import annotations

import types
from typing import Any

from npu_bridge.base.own_tensorflow import tf

__all__ = ["gelu", "npu_unary_ops"]


def gelu(x: Any) -> tf.Tensor:
    """Computes 0.5·x·(1 + tanh(√(2/π)·(x + 0.044715·x³))), as `tf.nn.gelu(x, approximate=True)`.

    Args:
      x: float tensor.
    Returns:
      Tensor of the shape and dtype of x.
    """
    return tf.nn.gelu(x, approximate=True)


# Scripts import this name from the module of the same name.
npu_unary_ops = types.SimpleNamespace(gelu=gelu)
