"""Defines `LruCache`, a cache of the NPU stack that is not available here."""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from npu_bridge.operators.unavailable import not_available_error

__all__ = ["LruCache"]


class LruCache:
    """Raises NotImplementedError: this cache needs a device of the NPU stack. Use `tf.nn.embedding_lookup` instead."""

    def __init__(self, cache_size: int = 100000, load_factor: float = 1, dtype: Any = tf.uint32):
        raise not_available_error(
            "lru_cache.LruCache",
            "an embedding cache shared by host and device",
            "Look rows up with tf.nn.embedding_lookup.",
        )
