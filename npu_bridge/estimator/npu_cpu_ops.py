"""Implements random choices, warping and stateless dropout; operators that need a device raise an error when called."""

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
    """Chooses at random among the places where a boolean tensor is True.

    Chooses at random among the positions where a boolean tensor is True.
    Args:
      x: boolean tensor of any rank.
      count: number of positions, without repetition; 0 for all.
      seed, seed2: both 0 for another choice each time.
    Returns:
      Positions, int32 [count, rank], and a mask [count]: if there are fewer positions than asked for, rows of 0 follow
      whose mask is False.
    Raises:
      ValueError: `count` is negative.
    """
    return positions.random_choice(x, count, seed, seed2, "npu_cpu_ops.randomchoicewithmask")


def stateless_random_choice_with_mask(x: Any, count: int, seed: Any, offset: Any) -> tuple[tf.Tensor, tf.Tensor]:
    """Chooses as `randomchoicewithmask`; the choice depends only on seed and offset, integers or scalar tensors."""
    return positions.stateless_random_choice(x, count, seed, offset, "npu_cpu_ops.stateless_random_choice_with_mask")


def dense_image_warp(image: Any, flow: Any, name: str | None = None) -> tf.Tensor:
    """Returns output[n, i, j] = image[n, i - flow[n, i, j, 0], j - flow[n, i, j, 1]], interpolated in both directions.

    Args:
      image: [N, H, W, C].
      flow: [N, H, W, 2]. Beyond the border of the image lies the border's value.
      name: scope of the ops.
    Returns:
      Tensor of the shape and dtype of the image.
    Raises:
      ValueError: a shape does not fit.
    """
    with tf.name_scope(name or "dense_image_warp"):
        return sampling.dense_image_warp(image, flow, "npu_cpu_ops.dense_image_warp")


def stateless_dropout(x: Any, noise_shape: Any, p: Any, seed: Any, offset: Any) -> tf.Tensor:
    """Drops the same elements whenever seed and offset are the same.

    Args:
      x: float tensor.
      noise_shape: shape of the random choice, which broadcasts to x; None for x's own.
      p: probability to drop an element, in [0, 1), as in `tf.nn.experimental.stateless_dropout`.
      seed, offset: integers or scalar tensors.
    Raises:
      ValueError: x is not a float tensor, or `p` is a number outside [0, 1).
    """
    return dropping.stateless_dropout(x, noise_shape, p, seed, offset, "npu_cpu_ops.stateless_dropout")


def embeddingrankid(addr_tensor: Any, index: Any, row_memory: int = 320, mode: str = "mod") -> Any:
    """Raises NotImplementedError: it computes device addresses. Exchange rows with `hccl_ops.all_to_all_v`."""
    alternative = "Exchange rows of a sharded table with hccl_ops.all_to_all_v."
    raise not_available_error("npu_cpu_ops.embeddingrankid", "a computation of device addresses", alternative)


def _unavailable(name, reason, alternative):
    return unavailable_function(f"npu_cpu_ops.{name}", reason, alternative)


_TABLE = ("a table in device memory", "Keep the table in a tf.Variable and use tf.nn.embedding_lookup.")
_QUEUE = ("a queue of an inference service", "Use tf.queue.FIFOQueue or tf.data.")
_TEXT = ("a kernel of text recognition", "Call OpenCV in a tf.numpy_function.")

resize_v2 = _unavailable("resize_v2", "an image kernel", "Use tf.image.resize.")
warp_affine_v2 = _unavailable("warp_affine_v2", "an image kernel", "Use tf.raw_ops.ImageProjectiveTransformV3.")
non_zero_with_value_shape = _unavailable("non_zero_with_value_shape", "an index kernel", "Use tf.where.")
non_zero_with_value_shape_v2 = _unavailable("non_zero_with_value_shape_v2", "an index kernel", "Use tf.where.")
embedding_local_index = _unavailable("embedding_local_index", *_TABLE)
table_to_resource_v2 = _unavailable("table_to_resource_v2", *_TABLE)
host_feature_mapping = _unavailable("host_feature_mapping", *_TABLE)
device_feature_mapping = _unavailable("device_feature_mapping", *_TABLE)
batch_enqueue = _unavailable("batch_enqueue", *_QUEUE)
dequeue = _unavailable("dequeue", *_QUEUE)
batch_dilate_polys = _unavailable("batch_dilate_polys", *_TEXT)
resize_and_clip_polys = _unavailable("resize_and_clip_polys", *_TEXT)

# Whole families of names that need the device.
_FAMILIES = {"embedding_hash": _TABLE, "init_": _TABLE, "deinit_": _TABLE, "ocr_": _TEXT}


def __getattr__(name: str) -> Any:
    for start, words in _FAMILIES.items():
        if name.startswith(start):
            return _unavailable(name, *words)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
