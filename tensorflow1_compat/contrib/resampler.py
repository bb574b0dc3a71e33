"""`tf.contrib.resampler`: samples images at arbitrary points."""

from __future__ import annotations

import tensorflow.compat.v1 as tf


def resampler(data, warp, name="resampler"):
    """Samples images at points, with bilinear interpolation.

    Args:
      data: float [batch, height, width, channels].
      warp: points, float [batch, ..., 2], as (x, y) in pixels; samples outside the image are 0.

    Returns:
      [batch, ..., channels].
    """
    with tf.name_scope(name):
        data, warp = tf.convert_to_tensor(data), tf.convert_to_tensor(warp)
        height, width = tf.shape(data)[1], tf.shape(data)[2]
        flat = tf.reshape(warp, [tf.shape(data)[0], -1, 2])
        low = tf.floor(flat)
        part = flat - low

        def sample_corner(dx, dy):
            x, y = tf.cast(low[..., 0], tf.int32) + dx, tf.cast(low[..., 1], tf.int32) + dy
            is_inside = (x >= 0) & (x < width) & (y >= 0) & (y < height)
            places = tf.stack([tf.clip_by_value(y, 0, height - 1), tf.clip_by_value(x, 0, width - 1)], -1)
            weight = (part[..., 0] if dx else 1 - part[..., 0]) * (part[..., 1] if dy else 1 - part[..., 1])
            found = tf.gather_nd(data, places, batch_dims=1)
            return found * (weight * tf.cast(is_inside, data.dtype))[..., None]

        sampled = sample_corner(0, 0) + sample_corner(1, 0) + sample_corner(0, 1) + sample_corner(1, 1)
        return tf.reshape(sampled, tf.concat([tf.shape(warp)[:-1], tf.shape(data)[3:]], 0))
