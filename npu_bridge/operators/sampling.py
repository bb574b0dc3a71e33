"""Computes image operators: bilinear sampling, warping, deformable convolution, and decoding with resizing."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from npu_bridge.base.errors import message
from npu_bridge.base.own_tensorflow import tf


def sample_bilinear(images: tf.Tensor, rows: tf.Tensor, columns: tf.Tensor) -> tf.Tensor:
    """Interpolates between the pixels of images; pixels outside of an image count as 0.

    Args:
      images: [N, H, W, C].
      rows, columns: float32 [N, ...], the positions to sample.
    Returns:
      [N, ..., C] in the dtype of images.
    """
    shape = tf.shape(images)
    height, width = shape[1], shape[2]
    flat = tf.reshape(images, [shape[0], height * width, images.shape.as_list()[3]])
    top, left = tf.floor(rows), tf.floor(columns)
    sampled = 0.0
    for row in (top, top + 1):
        for column in (left, left + 1):
            near = (1 - tf.abs(rows - row)) * (1 - tf.abs(columns - column))
            row_number, column_number = tf.cast(row, tf.int32), tf.cast(column, tf.int32)
            is_inside = (row_number >= 0) & (row_number < height) & (column_number >= 0) & (column_number < width)
            pixel = tf.where(is_inside, row_number * width + column_number, 0)
            value = tf.gather(flat, pixel, batch_dims=1)
            weight = tf.where(is_inside, near, 0.0)[..., tf.newaxis]
            sampled += weight * tf.cast(value, tf.float32)
    return (
        tf.saturate_cast(tf.round(sampled), images.dtype) if images.dtype.is_integer else tf.cast(sampled, images.dtype)
    )


def dense_image_warp(image: Any, flow: Any, where: str) -> tf.Tensor:
    """Returns output[n, i, j] = image[n, i - flow[n, i, j, 0], j - flow[n, i, j, 1]], interpolated between pixels.

    Positions outside of the image are moved to its border.
    """
    image, flow = tf.convert_to_tensor(image), tf.convert_to_tensor(flow)
    if image.shape.rank != 4 or flow.shape.rank != 4 or flow.shape.as_list()[3] != 2:
        got = f"shapes {image.shape} and {flow.shape}"
        raise ValueError(
            message(where, "a shape does not fit", "shapes [N, H, W, C] and [N, H, W, 2]", got, "Reshape the tensors.")
        )
    flow = tf.cast(flow, tf.float32)
    height, width = (tf.cast(tf.shape(image)[axis], tf.float32) for axis in (1, 2))
    rows = tf.range(height)[:, tf.newaxis] - flow[..., 0]
    columns = tf.range(width) - flow[..., 1]
    return sample_bilinear(image, tf.clip_by_value(rows, 0.0, height - 1), tf.clip_by_value(columns, 0.0, width - 1))


def deformable_conv2d(
    x: tf.Tensor,
    kernel: tf.Tensor,
    offsets: tf.Tensor,
    strides: Sequence[int],
    pads: Sequence[int],
    dilations: Sequence[int],
    groups: int,
    deformable_groups: int,
    where: str,
) -> tf.Tensor:
    """Convolves with kernel taps that are displaced by offsets; the pixel that a tap reads is multiplied by a weight.

    Args:
      x: [N, H, W, C].
      kernel: [kh, kw, C / groups, F].
      offsets: [N, H', W', 3·deformable_groups·kh·kw]: first all offsets to the right, by group and tap; then all
        offsets downwards; then all weights.
      strides, dilations: downwards and to the right.
      pads: top, bottom, left, right.
    Returns:
      [N, H', W', F] in the dtype of x.
    """
    kernel_height, kernel_width, _, filters = kernel.shape.as_list()
    taps, channels = kernel_height * kernel_width, x.shape.as_list()[3]
    _check_channels(x, kernel, offsets, taps, groups, deformable_groups, where)
    paddings = (pads[0] + pads[1], pads[2] + pads[3])
    size = list(
        map(_output_length, x.shape.as_list()[1:3], paddings, (kernel_height, kernel_width), dilations, strides)
    )
    if not offsets.shape[1:3].is_compatible_with(size):
        expected, got = f"height and width {size}", f"shape {offsets.shape}"
        fix = "Compute the offsets with the same strides, pads and dilations."
        raise ValueError(message(where, "offsets do not fit the output", expected, got, fix))
    shape = tf.shape(offsets)
    count, height, width = shape[0], shape[1], shape[2]
    # One column of positions for every group and tap: [N, H', W', 3, deformable groups, kh, kw].
    moved = tf.reshape(
        tf.cast(offsets, tf.float32), [count, height, width, 3, deformable_groups, kernel_height, kernel_width]
    )
    right, down, weights = tf.unstack(moved, axis=3)
    rows = (
        _tap_positions(height, strides[0], pads[0])[:, None, None, None, None]
        + _tap_positions(kernel_height, dilations[0])[:, None]
    )
    columns = _tap_positions(width, strides[1], pads[2])[:, None, None, None] + _tap_positions(
        kernel_width, dilations[1]
    )
    rows, columns = rows + down, columns + right
    of_groups = [
        sample_bilinear(part, rows[:, :, :, group], columns[:, :, :, group])
        * tf.cast(weights[:, :, :, group, ..., None], x.dtype)
        for group, part in enumerate(tf.split(x, deformable_groups, axis=3))
    ]
    sampled = tf.reshape(tf.concat(of_groups, axis=-1), [count, height, width, taps, groups, channels // groups])
    kernels = tf.reshape(kernel, [taps, channels // groups, groups, filters // groups])
    convolved = tf.einsum("nhwkgc,kcgf->nhwgf", sampled, tf.cast(kernels, x.dtype))
    return tf.ensure_shape(
        tf.reshape(convolved, [count, height, width, filters]), offsets.shape[:3].concatenate([filters])
    )


def decode_to_size(image: Any, size: Any, window: Any | None = None) -> tf.Tensor:
    """Decodes a JPEG to RGB and resizes it; with a window (top, left, height, width), decodes only this part."""
    if window is None:
        pixels = tf.io.decode_jpeg(image, channels=3)
    else:
        pixels = tf.io.decode_and_crop_jpeg(image, tf.cast(window, tf.int32), channels=3)
    return tf.saturate_cast(tf.round(tf.image.resize(pixels, tf.cast(size, tf.int32))), tf.uint8)


def _check_channels(x, kernel, offsets, taps, groups, deformable_groups, where):
    channels = x.shape.as_list()[3]
    *_, inputs, filters = kernel.shape.as_list()
    if channels % groups or filters % groups or channels % deformable_groups:
        got = f"{channels} channels, {filters} filters, groups={groups}, deformable_groups={deformable_groups}"
        raise ValueError(
            message(
                where,
                "groups do not divide the channels",
                "divisors of the channels",
                got,
                "Change the numbers of groups.",
            )
        )
    if inputs * groups != channels:
        got = f"{inputs} inputs for {channels} channels in {groups} groups"
        raise ValueError(
            message(where, "filter does not fit x", f"{channels // groups} inputs", got, "Change the shape of filter.")
        )
    if offsets.shape.as_list()[3] != 3 * deformable_groups * taps:
        expected = f"3·deformable_groups·kh·kw = {3 * deformable_groups * taps} channels"
        raise ValueError(
            message(where, "offsets do not fit", expected, f"shape {offsets.shape}", "Change the shape of offsets.")
        )


def _output_length(length, padding, kernel, dilation, stride):
    """Returns the number of positions of a dilated kernel along an axis; None when the axis length is unknown."""
    return length and (length + padding - dilation * (kernel - 1) - 1) // stride + 1


def _tap_positions(count, step, padding=0):
    """Returns the float32 positions -before, step - before, 2·step - before, ..."""
    return tf.cast(tf.range(count) * step - padding, tf.float32)
