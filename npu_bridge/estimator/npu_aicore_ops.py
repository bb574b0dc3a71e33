"""Provides further documented operators, computed by TensorFlow; `docs/operators.md` has the formulas."""

from __future__ import annotations

import types
from typing import Any

from npu_bridge.base.own_tensorflow import tf
from npu_bridge.operators import activations, dropping, positions
from npu_bridge.operators.unavailable import not_available_error, unavailable_function


def fast_gelu(features: Any) -> tf.Tensor:
    """Computes x·σ(1.702·x), an approximation of gelu, where x is `features`.

    Args:
      features: float tensor.
    Returns:
      Tensor of the shape and dtype of `features`.
    """
    return activations.fast_gelu(features)


def fast_gelu_v2(x: Any, name: str | None = None) -> tf.Tensor:
    """Approximates gelu with a polynomial of second order; differs from the exact gelu by at most 0.019.

    Computes x·(sgn(x)·(a/2·(min(|x|/√2, -b) + b)² + 0.5) + 0.5) with a = -0.2888, b = -1.769.

    Args:
      x: float tensor.
      name: scope of the ops.
    Returns:
      Tensor of the shape and dtype of x.
    """
    with tf.name_scope(name or "fast_gelu_v2"):
        return activations.fast_gelu_by_polynomial(x)


def centralization(x: Any, axes: Any, name: str | None = None) -> tf.Tensor:
    """Subtracts from x its mean over the given axes.

    Args:
      x: float tensor.
      axes: an axis or a list of axes.
      name: scope of the ops.
    """
    with tf.name_scope(name or "centralization"):
        return activations.centralize(x, axes)


def prelu(x: Any, weight: Any) -> tf.Tensor:
    """Computes max(x, 0) + weight·min(x, 0).

    Args:
      x: float tensor.
      weight: tensor that broadcasts to x.
    """
    return activations.prelu(x, weight)


def dropout_v3(
    x: Any, keep_prob: Any, noise_shape: Any = None, seed: int | None = None, name: str | None = None
) -> tf.Tensor:
    """Calls `npu_ops.dropout`: arguments, result and errors are the same."""
    return dropping.dropout(x, keep_prob, noise_shape, seed, name, "npu_aicore_ops.dropout_v3")


def dropout_v4(
    x: Any,
    keep_prob: Any,
    noise_shape: Any = None,
    seed: int | None = None,
    output_dtype: Any = tf.bool,
    name: str | None = None,
) -> tf.Tensor:
    """Returns the random mask of `npu_ops.dropout`: True (or 1) for elements that are kept.

    Args:
      x, keep_prob, noise_shape, seed: as in `npu_ops.dropout`.
      output_dtype: dtype of the result.
      name: scope of the ops.
    Returns:
      Tensor of shape `noise_shape`, or of the shape of x.
    Raises:
      ValueError: x is not a float tensor, or `keep_prob` is a number outside (0, 1].
    """
    return dropping.keep_mask(x, keep_prob, noise_shape, seed, output_dtype, name, "npu_aicore_ops.dropout_v4")


def layer_norm(
    x: Any,
    gamma: Any,
    beta: Any,
    begin_norm_axis: int = 0,
    begin_params_axis: int = 0,
    epsilon: float = 1e-7,
    name: str | None = None,
) -> tuple[tf.Tensor, tf.Tensor, tf.Tensor]:
    """Computes gamma·(x - mean) / √(variance + epsilon) + beta.

    Args:
      x: float tensor of known rank.
      gamma, beta: tensors of the shape `x.shape[begin_params_axis:]`.
      begin_norm_axis: first of the axes over which mean and variance are computed, up to the last axis.
      begin_params_axis: first axis of x that gamma and beta have.
      epsilon: as in the formula.
      name: scope of the ops.
    Returns:
      The result, the mean and the biased variance. Mean and variance have size 1 in the normalised axes.
    Raises:
      ValueError: x lacks one of the axes, or the shape of gamma or beta does not fit.
    """
    where = "npu_aicore_ops.layer_norm"
    with tf.name_scope(name or "layer_norm"):
        return activations.layer_norm(x, gamma, beta, begin_norm_axis, begin_params_axis, epsilon, where)


def nonzero(x: Any, transpose: bool = False, output_type: Any = tf.int64, name: str | None = None) -> tf.Tensor:
    """Returns the indices of the elements that are not 0.

    Args:
      x: numeric or boolean tensor.
      transpose: False for shape [rank, n], True for [n, rank].
      output_type: dtype of the result.
      name: scope of the ops.
    """
    with tf.name_scope(name or "nonzero"):
        return positions.nonzero(x, transpose, output_type)


def nonzerowithvalue(
    x: Any, transpose: bool = False, output_type: Any = tf.int64, name: str | None = None
) -> tuple[tf.Tensor, tf.Tensor, tf.Tensor]:
    """Returns the elements that are not 0 and their indices, padded with zeros to a fixed size.

    Args:
      x: matrix.
      transpose: order of the indices: False for all row indices, then all column indices; True for pairs of row and
        column.
      output_type: dtype of the indices and of the count.
      name: scope of the ops.
    Returns:
      Values, padded to the number of elements of x; indices, padded to twice that number; the count of the elements
      that are not 0, of shape [1].
    Raises:
      ValueError: x is not a matrix.
    """
    with tf.name_scope(name or "nonzerowithvalue"):
        return positions.nonzero_with_value(x, transpose, output_type, "npu_aicore_ops.nonzerowithvalue")


def lru_cache_v2(
    index_list: Any, data: Any, cache: Any, tag: Any, is_last_call: Any, pre_route_count: int, name: str | None = None
) -> Any:
    """Raises NotImplementedError: the cache needs device memory. Use `tf.nn.embedding_lookup` instead."""
    raise not_available_error(
        "npu_aicore_ops.lru_cache_v2", "a cache in device memory", "Look rows up with tf.nn.embedding_lookup."
    )


def _make_unavailable_kernel(name):
    return unavailable_function(
        f"npu_aicore_ops.{name}",
        "a kernel of molecular dynamics",
        "DeePMD-kit has this operator for processors and GPUs.",
    )


prod_env_mat_a = _make_unavailable_kernel("prod_env_mat_a")
prodvirialsea = _make_unavailable_kernel("prodvirialsea")
prodforcesea = _make_unavailable_kernel("prodforcesea")
tabulatefusionsea = _make_unavailable_kernel("tabulatefusionsea")
tabulatefusionseagrad = _make_unavailable_kernel("tabulatefusionseagrad")
tabulatefusion = _make_unavailable_kernel("tabulatefusion")
tabulatefusiongrad = _make_unavailable_kernel("tabulatefusiongrad")

_OPERATORS = (
    "centralization",
    "dropout_v3",
    "dropout_v4",
    "fast_gelu",
    "fast_gelu_v2",
    "layer_norm",
    "lru_cache_v2",
    "nonzero",
    "nonzerowithvalue",
    "prelu",
    "prod_env_mat_a",
    "prodforcesea",
    "prodvirialsea",
    "tabulatefusion",
    "tabulatefusiongrad",
    "tabulatefusionsea",
    "tabulatefusionseagrad",
)
__all__ = [*_OPERATORS, "npu_aicore_ops"]

# Scripts import this name from the module of the same name.
npu_aicore_ops = types.SimpleNamespace(**{name: globals()[name] for name in _OPERATORS})
