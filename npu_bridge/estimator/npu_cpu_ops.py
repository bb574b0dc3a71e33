"""Provides random choice, image warping and stateless dropout; operators that need a device raise an error."""

from __future__ import annotations

from typing import Any

from npu_bridge.base.own_tensorflow import tf
from npu_bridge.operators import dropping, positions, sampling
from npu_bridge.operators.unavailable import not_available_error, unavailable_function

__all__ = [
    "batch_dilate_polys",
    "batch_enqueue",
    "dense_image_warp",
    "dequeue",
    "device_feature_mapping",
    "embedding_local_index",
    "embeddingrankid",
    "host_feature_mapping",
    "non_zero_with_value_shape",
    "non_zero_with_value_shape_v2",
    "randomchoicewithmask",
    "resize_and_clip_polys",
    "resize_v2",
    "stateless_dropout",
    "stateless_random_choice_with_mask",
    "table_to_resource_v2",
    "warp_affine_v2",
]


def randomchoicewithmask(x: Any, count: int, seed: int = 0, seed2: int = 0) -> tuple[tf.Tensor, tf.Tensor]:
    """Chooses at random among the positions where a boolean tensor is True.

    Args:
      x: boolean tensor of any rank.
      count: number of positions to choose, without repetition; 0 for all.
      seed, seed2: seeds of the random choice; if both are 0, every run chooses differently.
    Returns:
      Positions, int32 [count, rank of x], and a boolean mask [count]. If x has fewer than `count` positions, the
      remaining rows are 0, and their mask is False.
    Raises:
      ValueError: `count` is negative.
    """
    return positions.random_choice(x, count, seed, seed2, "npu_cpu_ops.randomchoicewithmask")


def stateless_random_choice_with_mask(x: Any, count: int, seed: Any, offset: Any) -> tuple[tf.Tensor, tf.Tensor]:
    """Chooses positions like `randomchoicewithmask`, determined by `seed` and `offset` (integers or scalar tensors)."""
    return positions.stateless_random_choice(x, count, seed, offset, "npu_cpu_ops.stateless_random_choice_with_mask")


def dense_image_warp(image: Any, flow: Any, name: str | None = None) -> tf.Tensor:
    """Returns output[n, i, j] = image[n, i - flow[n, i, j, 0], j - flow[n, i, j, 1]], interpolated in both directions.

    Args:
      image: [N, H, W, C].
      flow: [N, H, W, 2]. Positions outside of the image get the value of the nearest border pixel.
      name: scope of the ops.
    Returns:
      Tensor of the shape and dtype of `image`.
    Raises:
      ValueError: a shape does not fit.
    """
    with tf.name_scope(name or "dense_image_warp"):
        return sampling.dense_image_warp(image, flow, "npu_cpu_ops.dense_image_warp")


def stateless_dropout(x: Any, noise_shape: Any, p: Any, seed: Any, offset: Any) -> tf.Tensor:
    """Applies dropout that depends only on `seed` and `offset`: equal values drop the same elements.

    Args:
      x: float tensor.
      noise_shape: shape of the random mask, which broadcasts to x; None for the shape of x.
      p: probability to drop an element, in [0, 1), as in `tf.nn.experimental.stateless_dropout`.
      seed, offset: integers or scalar tensors.
    Raises:
      ValueError: x is not a float tensor, or `p` is a number outside [0, 1).
    """
    return dropping.stateless_dropout(x, noise_shape, p, seed, offset, "npu_cpu_ops.stateless_dropout")


def embeddingrankid(addr_tensor: Any, index: Any, row_memory: int = 320, mode: str = "mod") -> Any:
    """Raises NotImplementedError: there are no device addresses to compute. Use `hccl_ops.all_to_all_v` instead."""
    alternative = "Exchange rows of a sharded table with hccl_ops.all_to_all_v."
    raise not_available_error("npu_cpu_ops.embeddingrankid", "a computation of device addresses", alternative)


def _unavailable_operator(name, reason, alternative):
    return unavailable_function(f"npu_cpu_ops.{name}", reason, alternative)


_TABLE = ("a table in device memory", "Keep the table in a tf.Variable and use tf.nn.embedding_lookup.")
_QUEUE = ("a queue of an inference service", "Use tf.queue.FIFOQueue or tf.data.")
_TEXT = ("a kernel of text recognition", "Call OpenCV in a tf.numpy_function.")

resize_v2 = _unavailable_operator("resize_v2", "an image kernel", "Use tf.image.resize.")
warp_affine_v2 = _unavailable_operator(
    "warp_affine_v2", "an image kernel", "Use tf.raw_ops.ImageProjectiveTransformV3."
)
non_zero_with_value_shape = _unavailable_operator("non_zero_with_value_shape", "an index kernel", "Use tf.where.")
non_zero_with_value_shape_v2 = _unavailable_operator("non_zero_with_value_shape_v2", "an index kernel", "Use tf.where.")
embedding_local_index = _unavailable_operator("embedding_local_index", *_TABLE)
table_to_resource_v2 = _unavailable_operator("table_to_resource_v2", *_TABLE)
host_feature_mapping = _unavailable_operator("host_feature_mapping", *_TABLE)
device_feature_mapping = _unavailable_operator("device_feature_mapping", *_TABLE)
batch_enqueue = _unavailable_operator("batch_enqueue", *_QUEUE)
dequeue = _unavailable_operator("dequeue", *_QUEUE)
batch_dilate_polys = _unavailable_operator("batch_dilate_polys", *_TEXT)
resize_and_clip_polys = _unavailable_operator("resize_and_clip_polys", *_TEXT)

# Whole families of names that need the device.
_FAMILIES = {"embedding_hash": _TABLE, "init_": _TABLE, "deinit_": _TABLE, "ocr_": _TEXT}


def __getattr__(name: str) -> Any:
    for start, words in _FAMILIES.items():
        if name.startswith(start):
            return _unavailable_operator(name, *words)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
