"""Decodes and resizes JPEG images."""

from __future__ import annotations

from typing import Any

from npu_bridge.base.own_tensorflow import tf
from npu_bridge.operators import sampling

__all__ = ["decode_and_crop_and_resize_jpeg", "decode_and_resize_jpeg"]


def decode_and_resize_jpeg(image: Any, size: Any) -> tf.Tensor:
    """Decodes a JPEG to RGB and resizes it, interpolating linearly in both directions.

    Args:
      image: scalar string tensor, the bytes of the file.
      size: height and width.
    Returns:
      uint8 [height, width, 3].
    """
    return sampling.decode_to_size(image, size)


def decode_and_crop_and_resize_jpeg(image: Any, crop_size: Any, size: Any) -> tf.Tensor:
    """Decodes a part of a JPEG to RGB and resizes it, interpolating linearly in both directions.

    Args:
      image, size: as in `decode_and_resize_jpeg`.
      crop_size: top, left, height and width of the part.
    """
    return sampling.decode_to_size(image, size, crop_size)
