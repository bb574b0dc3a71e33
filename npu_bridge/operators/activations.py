"""Computes functions of one tensor: activations and normalisations."""

from __future__ import annotations

from typing import Any

from npu_bridge.base.errors import message
from npu_bridge.base.own_tensorflow import tf

# The second-order fit of the error function of I-BERT (Kim et al., 2021), L(x) = sgn(x)·(a·(min(|x|, -b) + b)² + 1).
_FIT_A, _FIT_B = -0.2888, -1.769


def fast_gelu(x: Any) -> tf.Tensor:
    """Returns x·σ(1.702·x)."""
    x = tf.convert_to_tensor(x)
    return x * tf.sigmoid(1.702 * x)


def fast_gelu_grad(dy: Any, x: Any) -> tf.Tensor:
    """Returns the gradient of `fast_gelu` of x for an incoming dy: dy·(s + 1.702·x·s·(1 - s)), s = σ(1.702·x)."""
    x = tf.convert_to_tensor(x)
    gate = tf.sigmoid(1.702 * x)
    return dy * (gate + 1.702 * x * gate * (1 - gate))


def fast_gelu_by_polynomial(x: Any) -> tf.Tensor:
    """Returns x·(L(x/√2) + 1) / 2, where the polynomial L of second order approximates the error function."""
    x = tf.convert_to_tensor(x)
    clipped = tf.minimum(tf.abs(x) * 0.5**0.5, -_FIT_B)
    half_erf = tf.sign(x) * (_FIT_A / 2 * tf.square(clipped + _FIT_B) + 0.5)
    return x * (half_erf + 0.5)


def prelu(x: Any, weight: Any) -> tf.Tensor:
    """Returns max(x, 0) + weight·min(x, 0), with a weight that broadcasts to x; the gradient at 0 is the weight."""
    x = tf.convert_to_tensor(x)
    return tf.where(x > 0, x, tf.cast(weight, x.dtype) * x)


def centralize(x: Any, axes: Any) -> tf.Tensor:
    """Returns x minus its mean over `axes`."""
    x = tf.convert_to_tensor(x)
    return x - tf.reduce_mean(x, axes, keepdims=True)


def layer_norm(
    x: Any, gamma: Any, beta: Any, begin_norm_axis: int, begin_params_axis: int, epsilon: float, where: str
) -> tuple[tf.Tensor, tf.Tensor, tf.Tensor]:
    """Returns the normalised x, and its mean and biased variance, whose axes from `begin_norm_axis` on have size 1.

    Computes in float32 at least.
    """
    x = tf.convert_to_tensor(x)
    rank = x.shape.rank
    if rank is None:
        raise ValueError(message(where, "x has no known rank", "a known number of axes", str(x), "Set the shape of x."))
    norm_axis, params_axis = (
        _check_axis(axis, rank, name, where)
        for axis, name in ((begin_norm_axis, "begin_norm_axis"), (begin_params_axis, "begin_params_axis"))
    )
    parameters = [tf.convert_to_tensor(parameter, x.dtype) for parameter in (gamma, beta)]
    for parameter in parameters:
        if not parameter.shape.is_compatible_with(x.shape[params_axis:]):
            expected, got = f"shape {x.shape[params_axis:]}", f"shape {parameter.shape}"
            raise ValueError(message(where, "gamma or beta does not fit x", expected, got, "Set begin_params_axis."))
    wide = tf.cast(x, tf.float32) if x.dtype.size < 4 else x
    # Not tf.nn.moments: TensorFlow 2.15 on x86 takes its operators and those after them for a pattern it can fuse, and
    # its rewriter then crashes with a segmentation fault if gamma is fed or computed.
    axes = list(range(norm_axis, rank))
    mean = tf.reduce_mean(wide, axes, keepdims=True)
    centred = wide - mean
    variance = tf.reduce_mean(tf.square(centred), axes, keepdims=True)
    normalised = tf.cast(centred * tf.math.rsqrt(variance + epsilon), x.dtype)
    scale, shift = parameters
    return normalised * scale + shift, tf.cast(mean, x.dtype), tf.cast(variance, x.dtype)


def _check_axis(axis: int, rank: int, name: str, where: str) -> int:
    if not -rank <= axis < rank:
        raise ValueError(
            message(where, f"{name} is not an axis of x", f"{-rank} to {rank - 1}", str(axis), "Give an axis of x.")
        )
    return axis % rank
