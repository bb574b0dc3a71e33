"""`tf.contrib.distributions`: the distributions that TensorFlow still has, and percentiles."""

from __future__ import annotations

import tensorflow.compat.v1 as tf
from tensorflow.compat.v1.distributions import *
from tensorflow.python.ops.distributions.util import fill_triangular


class MultivariateNormalDiag(tf.distributions.Distribution):
    """Independent normal distributions over the last axis, with `loc` and `scale_diag` of shape [..., k]."""

    def __init__(
        self, loc=None, scale_diag=None, scale_identity_multiplier=None, validate_args=False, allow_nan_stats=True,
        name="MultivariateNormalDiag",
    ):  # fmt: skip
        if loc is None and scale_diag is None:
            raise ValueError("MultivariateNormalDiag: expected loc or scale_diag; got neither.")
        loc = tf.zeros_like(scale_diag) if loc is None else tf.convert_to_tensor(loc)
        scale = tf.ones_like(loc) if scale_diag is None else tf.convert_to_tensor(scale_diag, loc.dtype)
        if scale_identity_multiplier is not None:
            scale = scale * scale_identity_multiplier if scale_diag is None else scale + scale_identity_multiplier
        self._normal = tf.distributions.Normal(loc, scale + tf.zeros_like(loc))
        super().__init__(
            dtype=loc.dtype, reparameterization_type=tf.distributions.FULLY_REPARAMETERIZED,
            validate_args=validate_args, allow_nan_stats=allow_nan_stats, parameters={}, name=name,
        )  # fmt: skip

    loc = property(lambda self: self._normal.loc)

    def _batch_shape_tensor(self):
        return self._normal.batch_shape_tensor()[:-1]

    def _batch_shape(self):
        return self._normal.batch_shape[:-1]

    def _event_shape_tensor(self):
        return self._normal.batch_shape_tensor()[-1:]

    def _event_shape(self):
        return self._normal.batch_shape[-1:]

    def _sample_n(self, n, seed=None):
        return self._normal.sample(n, seed)

    def _log_prob(self, x):
        return tf.reduce_sum(self._normal.log_prob(x), -1)

    def _prob(self, x):
        return tf.exp(self._log_prob(x))

    def _entropy(self):
        return tf.reduce_sum(self._normal.entropy(), -1)

    def _mean(self):
        return self._normal.mean()

    _mode = _mean

    def _stddev(self):
        return self._normal.stddev()

    def _variance(self):
        return tf.square(self._normal.stddev())

    def _covariance(self):
        return tf.matrix_diag(self._variance())


@tf.distributions.RegisterKL(MultivariateNormalDiag, MultivariateNormalDiag)
def _kl_divergence(first, second, name=None):
    return tf.reduce_sum(tf.distributions.kl_divergence(first._normal, second._normal), -1)


def percentile(x, q, axis=None, interpolation=None, keep_dims=False, validate_args=False, name=None):
    """Returns the q-th percentile of values along axes.

    Args:
      x: tensor of numbers.
      q: scalar from 0 to 100.
      axis: an axis or a list of axes; None for all axes.
      interpolation: which of the two neighbouring values is returned: "lower", "higher" or "nearest" (default).
    """
    with tf.name_scope(name, "percentile", [x, q]):
        x = tf.convert_to_tensor(x)
        axes = list(range(x.shape.rank)) if axis is None else [axis] if isinstance(axis, int) else list(axis)
        axes = sorted(each % x.shape.rank for each in axes)
        others = [each for each in range(x.shape.rank) if each not in axes]
        moved = tf.transpose(x, others + axes)
        flat = tf.sort(tf.reshape(moved, tf.concat([tf.shape(moved)[: len(others)], [-1]], 0)))
        last = tf.cast(tf.shape(flat)[-1] - 1, tf.float64)
        above = last * (1.0 - tf.cast(q, tf.float64) / 100.0)  # 1.15 counts from the largest value on
        rounded = {"lower": tf.ceil, "higher": tf.floor, None: tf.round, "nearest": tf.round}[interpolation](above)
        found = tf.gather(flat, tf.cast(last - tf.clip_by_value(rounded, 0.0, last), tf.int32), axis=-1)
        if keep_dims:
            for each in axes:
                found = tf.expand_dims(found, each)
        return found
