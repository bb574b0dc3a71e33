"""`tf.contrib.nn`: additional operators for neural networks."""

from __future__ import annotations

import tensorflow.compat.v1 as tf
from tensorflow.compat.v2.nn import conv1d_transpose

_DROPPED = 1.7580993408473766


def alpha_dropout(x, keep_prob, noise_shape=None, seed=None, name=None):
    """Applies dropout that preserves the mean and variance in self-normalising networks (Klambauer and others)."""
    with tf.name_scope(name, "alpha_dropout", [x]):
        x = tf.convert_to_tensor(x)
        keep_prob = tf.convert_to_tensor(keep_prob, x.dtype)
        known = tf.get_static_value(keep_prob)
        if known is not None and (known.shape or not 0 < known <= 1):
            raise ValueError(f"alpha_dropout: keep_prob must be a number in (0, 1]; got {known}.")
        if known == 1:
            return x
        dropped = -_DROPPED
        drawn = tf.random_uniform(tf.shape(x) if noise_shape is None else noise_shape, dtype=x.dtype, seed=seed)
        is_kept = tf.cast(drawn >= 1 - keep_prob, x.dtype)
        scale = (keep_prob + dropped**2 * keep_prob * (1 - keep_prob)) ** -0.5
        return scale * (x * is_kept + dropped * (1 - is_kept)) - scale * dropped * (1 - keep_prob)


def scaled_softplus(x, alpha, clip=None, name=None):
    """Returns `alpha * softplus(x / alpha)`, at most `clip`."""
    result = alpha * tf.nn.softplus(x / alpha)
    return result if clip is None else tf.minimum(result, clip)


def deprecated_flipped_softmax_cross_entropy_with_logits(logits, labels, dim=-1, name=None):
    """Calls `tf.nn.softmax_cross_entropy_with_logits` with swapped arguments."""
    return tf.nn.softmax_cross_entropy_with_logits(labels=labels, logits=logits, dim=dim, name=name)


def deprecated_flipped_sparse_softmax_cross_entropy_with_logits(logits, labels, name=None):
    """Calls `tf.nn.sparse_softmax_cross_entropy_with_logits` with swapped arguments."""
    return tf.nn.sparse_softmax_cross_entropy_with_logits(labels=labels, logits=logits, name=name)


def deprecated_flipped_sigmoid_cross_entropy_with_logits(logits, targets, name=None):
    """Calls `tf.nn.sigmoid_cross_entropy_with_logits` with swapped arguments."""
    return tf.nn.sigmoid_cross_entropy_with_logits(labels=targets, logits=logits, name=name)
