"""`tf.contrib.sparsemax`: a sparse alternative to softmax, and its loss (Martins and Astudillo)."""

from __future__ import annotations

import tensorflow.compat.v1 as tf


def sparsemax(logits, name=None):
    """Projects `logits` [batch, classes] onto probability distributions. Rows that contain NaN or +inf become NaN."""
    with tf.name_scope(name, "sparsemax", [logits]):
        logits = tf.convert_to_tensor(logits, name="logits")
        ordered = tf.sort(logits, axis=1, direction="DESCENDING")
        sums = tf.cumsum(ordered, axis=1)
        ranks = tf.range(1, tf.cast(tf.shape(logits)[1], logits.dtype) + 1, dtype=logits.dtype)
        support = tf.reduce_sum(tf.cast(1 + ranks * ordered > sums, tf.int32), axis=1)
        # A row of NaN has an empty support, but the index must be valid.
        last = tf.maximum(support, 1) - 1
        threshold = (tf.gather(sums, last, axis=1, batch_dims=1) - 1) / tf.cast(support, logits.dtype)
        probabilities = tf.maximum(tf.cast(0, logits.dtype), logits - threshold[:, None])
        bad = tf.is_nan(sums[:, -1:]) | tf.equal(support, 0)[:, None]
        nothing = tf.cast(float("nan"), logits.dtype)
        return tf.compat.v2.where(bad, nothing, probabilities)


def sparsemax_loss(logits, sparsemax, labels, name=None):
    """Returns the sparsemax loss, [batch].

    Args:
      logits: float [batch, classes].
      sparsemax: the result of `sparsemax(logits)`.
      labels: target probabilities, [batch, classes].
    """
    with tf.name_scope(name, "sparsemax_loss", [logits, sparsemax, labels]):
        logits, sparsemax, labels = (tf.convert_to_tensor(each) for each in (logits, sparsemax, labels))
        nothing = tf.zeros_like(logits)
        # At probability 0, a logit of -inf has no effect.
        found = tf.where((sparsemax > 0) | tf.is_nan(sparsemax), sparsemax * (logits - 0.5 * sparsemax), nothing)
        wanted = tf.where(tf.equal(labels, 0) & tf.math.is_inf(logits), nothing, labels * (0.5 * labels - logits))
        return tf.reduce_sum(found + wanted, axis=1)
