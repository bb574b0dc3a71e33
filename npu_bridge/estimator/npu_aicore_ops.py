"""Computes further operators by TensorFlow; `docs/operators.md` has the formulas."""

from __future__ import annotations

import types
from typing import Any

from npu_bridge.base.own_tensorflow import tf
from npu_bridge.operators import activations, dropping, positions
from npu_bridge.operators.unavailable import not_available_error, unavailable_function


def fast_gelu(features: Any) -> tf.Tensor:
    """Computes x·σ(1.702·x).

    Args:
      features: float tensor.
    Returns:
      Tensor of the same shape and dtype.
    """
    return activations.fast_gelu(features)


def fast_gelu_v2(x: Any, name: str | None = None) -> tf.Tensor:
    """Computes gelu with a polynomial of second order instead of the error function; at most 0.019 away from it.

    x·(sgn(x)·(a/2·(min(|x|/√2, -b) + b)² + 0.5) + 0.5) with a = -0.2888, b = -1.769.

    Args:
      x: float tensor.
      name: scope of the ops.
    Returns:
      Tensor of the same shape and dtype.
    """
    with tf.name_scope(name or "fast_gelu_v2"):
        return activations.fast_gelu_by_polynomial(x)


def centralization(x: Any, axes: Any, name: str | None = None) -> tf.Tensor:
    """Subtracts the mean of x over some axes.

    Args:
      x: float tensor.
      axes: integer or list of integers.
      name: scope of the ops.
    """
    with tf.name_scope(name or "centralization"):
        return activations.centralize(x, axes)


def prelu(x: Any, weight: Any) -> tf.Tensor:
    """Computes max(x, 0) + weight·min(x, 0).

    Args:
      x: float tensor.
      weight: broadcasts to x.
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
    """Returns the random choice of `npu_ops.dropout`: True, or 1, for elements that are kept.

    Args:
      x, keep_prob, noise_shape, seed: as in `npu_ops.dropout`.
      output_dtype: dtype of the result.
      name: scope of the ops.
    Returns:
      Tensor of shape `noise_shape`, or of the shape of x.
    Raises:
      ValueError: as `npu_ops.dropout`.
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
      gamma, beta: of the shape of x from `begin_params_axis` on.
      begin_norm_axis: the first of the axes over which mean and variance are taken.
      begin_params_axis: the first of the axes that gamma and beta have.
      epsilon: as in the formula.
      name: scope of the ops.
    Returns:
      y, the mean and the biased variance, the last two with 1 in the normalised axes.
    Raises:
      ValueError: an axis is not one of x, or gamma and beta do not fit.
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
    """Returns the elements that are not 0, in tensors of a shape that does not depend on their number.

    Args:
      x: matrix.
      transpose: order of the indices: False for all rows, then all columns; True for row and column in turn.
      output_type: dtype of indices and number.
      name: scope of the ops.
    Returns:
      Values, as many as x has elements, the last ones 0; indices, twice as many; the number of values, of shape [1].
    Raises:
      ValueError: x is not a matrix.
    """
    with tf.name_scope(name or "nonzerowithvalue"):
        return positions.nonzero_with_value(x, transpose, output_type, "npu_aicore_ops.nonzerowithvalue")


def lru_cache_v2(
    index_list: Any, data: Any, cache: Any, tag: Any, is_last_call: Any, pre_route_count: int, name: str | None = None
) -> Any:
    """Raises NotImplementedError: it is a cache in device memory. Look up rows with `tf.nn.embedding_lookup`."""
    raise not_available_error(
        "npu_aicore_ops.lru_cache_v2", "a cache in device memory", "Look rows up with tf.nn.embedding_lookup."
    )


def _of_molecular_dynamics(name):
    return unavailable_function(
        f"npu_aicore_ops.{name}",
        "a kernel of molecular dynamics",
        "DeePMD-kit has this operator for processors and GPUs.",
    )


prod_env_mat_a = _of_molecular_dynamics("prod_env_mat_a")
prodvirialsea = _of_molecular_dynamics("prodvirialsea")
prodforcesea = _of_molecular_dynamics("prodforcesea")
tabulatefusionsea = _of_molecular_dynamics("tabulatefusionsea")
tabulatefusionseagrad = _of_molecular_dynamics("tabulatefusionseagrad")
tabulatefusion = _of_molecular_dynamics("tabulatefusion")
tabulatefusiongrad = _of_molecular_dynamics("tabulatefusiongrad")

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
