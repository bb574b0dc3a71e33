"""Defines the cross entropy of sequences."""

from __future__ import annotations

import tensorflow.compat.v1 as tf


def sequence_loss(
    logits, targets, weights, average_across_timesteps=True, average_across_batch=True, sum_over_timesteps=False,
    sum_over_batch=False, softmax_loss_function=None, name=None,
):  # fmt: skip
    """Returns the weighted cross entropy of a batch of sequences.

    Args:
      logits: [batch, time, classes].
      targets: integers [batch, time].
      weights: float [batch, time].
      average_across_timesteps, average_across_batch: whether to divide the sum over time, or over the batch, by the sum
        of the weights.
      sum_over_timesteps, sum_over_batch: whether to divide the sum over time, or over the batch, by the number of
        weights above 0.
      softmax_loss_function: `(labels=, logits=) -> losses`; default: sparse softmax cross entropy.

    Returns:
      A scalar; [batch], [time] or [batch, time] if one or both axes are neither averaged nor summed.
    """
    if logits.shape.rank != 3 or targets.shape.rank != 2 or weights.shape.rank != 2:
        raise ValueError("sequence_loss: expected logits of rank 3, targets and weights of rank 2; got "
                         f"{logits.shape}, {targets.shape}, {weights.shape}.")  # fmt: skip
    if (average_across_timesteps and sum_over_timesteps) or (average_across_batch and sum_over_batch):
        raise ValueError("sequence_loss: an axis is both averaged and summed.")
    with tf.name_scope(name, "sequence_loss", [logits, targets, weights]):
        flat = tf.reshape(logits, [-1, tf.shape(logits)[2]])
        labels = tf.reshape(targets, [-1])
        function = softmax_loss_function or tf.nn.sparse_softmax_cross_entropy_with_logits
        losses = function(labels=labels, logits=flat) * tf.reshape(weights, [-1])
        tiny = 1e-12
        if average_across_timesteps and average_across_batch:
            return tf.reduce_sum(losses) / (tf.reduce_sum(weights) + tiny)
        if sum_over_timesteps and sum_over_batch:
            count = tf.cast(tf.math.count_nonzero(weights), losses.dtype)
            return tf.math.divide_no_nan(tf.reduce_sum(losses), count)
        losses = tf.reshape(losses, tf.shape(logits)[:2])
        for axis, is_averaged, is_summed in (
            (1, average_across_timesteps, sum_over_timesteps), (0, average_across_batch, sum_over_batch),
        ):  # fmt: skip
            axis = min(axis, losses.shape.rank - 1)
            if is_averaged:
                losses, weights = tf.reduce_sum(losses, axis), tf.reduce_sum(weights, axis)
                losses = losses / (weights + tiny)
            elif is_summed:
                count = tf.cast(tf.math.count_nonzero(weights, axis=axis), losses.dtype)
                losses = tf.math.divide_no_nan(tf.reduce_sum(losses, axis), count)
        return losses
