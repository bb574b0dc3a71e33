"""Derives the ready-made estimators of `tf.contrib.learn` from those of `tf.estimator`."""

from __future__ import annotations

import functools

import tensorflow.compat.v1 as tf


def _with_mean_loss(estimator_class):
    """Derives a class whose loss is the mean over the batch; in `tf.estimator` it is the sum."""

    class WithMeanLoss(estimator_class):
        @functools.wraps(estimator_class.__init__)
        def __init__(self, *arguments, loss_reduction=tf.losses.Reduction.SUM_OVER_BATCH_SIZE, **keywords):
            super().__init__(*arguments, loss_reduction=loss_reduction, **keywords)

    WithMeanLoss.__name__ = WithMeanLoss.__qualname__ = estimator_class.__name__
    WithMeanLoss.__doc__ = f"A `tf.estimator.{estimator_class.__name__}` whose loss is the mean over the batch."
    return WithMeanLoss


DNNClassifier = _with_mean_loss(tf.estimator.DNNClassifier)
DNNLinearCombinedClassifier = _with_mean_loss(tf.estimator.DNNLinearCombinedClassifier)
DNNLinearCombinedRegressor = _with_mean_loss(tf.estimator.DNNLinearCombinedRegressor)
DNNRegressor = _with_mean_loss(tf.estimator.DNNRegressor)
LinearClassifier = _with_mean_loss(tf.estimator.LinearClassifier)
LinearRegressor = _with_mean_loss(tf.estimator.LinearRegressor)
