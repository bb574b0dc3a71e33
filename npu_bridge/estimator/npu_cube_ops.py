"""Implements deformable convolution."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from npu_bridge.base.errors import message
from npu_bridge.base.own_tensorflow import tf
from npu_bridge.operators import sampling

__all__ = ["deformable_conv2d"]

_WHERE = "npu_cube_ops.deformable_conv2d"


def deformable_conv2d(
    x: Any,
    filter: Any,  # noqa: A002 - the documented name
    offsets: Any,
    strides: Sequence[int] | None = None,
    pads: Sequence[int] | None = None,
    data_format: str = "NHWC",
    dilations: Sequence[int] = (1, 1, 1, 1),
    groups: int = 1,
    deformable_groups: int = 1,
    modulated: bool = True,
    name: str | None = None,
) -> tf.Tensor:
    """Computes a deformable convolution, version 2: every tap of the kernel has an offset and a weight at each pixel.

    Values between pixels are interpolated bilinearly; values outside of the image are 0.

    Args:
      x: [N, H, W, C], or [N, C, H, W].
      filter: [kh, kw, C / groups, F].
      offsets: tensor in the layout of x, with the height and width of the result and 3·deformable_groups·kh·kw
        channels: first the offsets of all taps to the right, then their offsets downwards, then their weights. Each of
        these three parts is ordered by group, then by tap.
      strides, dilations: four integers each, in the order of `data_format`; 1 by default.
      pads: top, bottom, left, right; 0 by default.
      data_format: "NHWC" or "NCHW".
      groups: groups of the convolution.
      deformable_groups: groups of channels with their own offsets.
      modulated: must be True.
      name: scope of the ops.
    Returns:
      [N, H', W', F], or [N, F, H', W'].
    Raises:
      ValueError: an argument is not as described here, or a shape does not fit.
    """
    if not modulated:
        fix = "Pass weights of 1 in the last third of offsets."
        raise ValueError(message(_WHERE, "modulated has an unsupported value", "True", repr(modulated), fix))
    if data_format not in ("NHWC", "NCHW"):
        raise ValueError(
            message(_WHERE, "data_format is unknown", "'NHWC' or 'NCHW'", repr(data_format), "Transpose x.")
        )
    strides = _check_four_integers(strides, "strides", (1, 1, 1, 1))
    dilations = _check_four_integers(dilations, "dilations", (1, 1, 1, 1))
    pads = _check_four_integers(pads, "pads", (0, 0, 0, 0))
    with tf.name_scope(name or "deformable_conv2d"):
        x, filter, offsets = (tf.convert_to_tensor(value) for value in (x, filter, offsets))
        height, width = data_format.index("H"), data_format.index("W")
        if data_format == "NCHW":
            x, offsets = (tf.transpose(value, [0, 2, 3, 1]) for value in (x, offsets))
        convolved = sampling.deformable_conv2d(
            x,
            filter,
            offsets,
            (strides[height], strides[width]),
            pads,
            (dilations[height], dilations[width]),
            groups,
            deformable_groups,
            _WHERE,
        )
        return tf.transpose(convolved, [0, 3, 1, 2]) if data_format == "NCHW" else convolved


def _check_four_integers(values: Sequence[int] | None, name: str, default: Sequence[int]) -> Sequence[int]:
    values = default if values is None else values
    if len(values) != 4:
        raise ValueError(
            message(_WHERE, f"{name} has the wrong length", "four integers", repr(values), "Write four integers.")
        )
    return values
