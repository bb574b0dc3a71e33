"""Defines the ready-made estimators of `tf.contrib.learn`, and arguments and results of its model functions."""

from __future__ import annotations

import collections
import functools
import inspect

import tensorflow.compat.v1 as tf


class ModeKeys:
    """Modes of a model function, as `tf.estimator` passes them."""

    TRAIN = tf.estimator.ModeKeys.TRAIN
    EVAL = tf.estimator.ModeKeys.EVAL
    INFER = tf.estimator.ModeKeys.PREDICT

    @classmethod
    def validate(cls, key):
        """Raises ValueError for an unknown mode."""
        if key not in (cls.TRAIN, cls.EVAL, cls.INFER):
            raise ValueError(f"ModeKeys: {key!r} is not a mode. Expected {cls.TRAIN!r}, {cls.EVAL!r} or {cls.INFER!r}.")


class PredictionKey:
    """Keys of the dict of predictions."""

    CLASSES, PROBABILITIES, LOGITS = "classes", "probabilities", "logits"
    LOGISTIC, SCORES, TOP_K, GENERIC = "logistic", "scores", "top_k", "output"


class ProblemType:
    """Kinds of learning problems."""

    UNSPECIFIED, CLASSIFICATION, LINEAR_REGRESSION, LOGISTIC_REGRESSION = 0, 1, 2, 3


InputFnOps = collections.namedtuple("InputFnOps", ("features", "labels", "default_inputs"))


class MetricSpec:
    """A metric function with the keys of the predictions, labels and weights that it takes."""

    def __init__(self, metric_fn, prediction_key=None, label_key=None, weight_key=None):
        self.metric_fn, self.prediction_key = metric_fn, prediction_key
        self.label_key, self.weight_key = label_key, weight_key

    def create_metric_ops(self, inputs, labels, predictions):
        """Calls `metric_fn` with the predictions, labels and weights of the given keys; returns the result.

        Passes them by name, as functions of `tf.metrics` take labels first. Without such names predictions are first.
        """

        def pick_value(values, key):
            if isinstance(values, dict):
                return next(iter(values.values())) if key is None and len(values) == 1 else values[key]
            return values

        predicted, right = pick_value(predictions, self.prediction_key), pick_value(labels, self.label_key)
        weights = inputs[self.weight_key] if self.weight_key else None
        given = {"prediction": predicted, "logit": predicted, "label": right, "target": right, "weight": weights}
        names = inspect.signature(self.metric_fn).parameters
        named = {name: given[name.rstrip("s")] for name in names if name.rstrip("s") in given}
        if weights is None:
            named = {name: value for name, value in named.items() if not name.startswith("weight")}
        if any(value is predicted for value in named.values()) and any(value is right for value in named.values()):
            return self.metric_fn(**named)
        return self.metric_fn(predicted, right, **({} if weights is None else {"weights": weights}))


def ModelFnOps(
    mode, predictions=None, loss=None, train_op=None, eval_metric_ops=None, output_alternatives=None,
    training_chief_hooks=None, training_hooks=None, scaffold=None,
):  # fmt: skip
    """Returns a model function's results as a `tf.estimator.EstimatorSpec`."""
    return tf.estimator.EstimatorSpec(
        mode, predictions=predictions, loss=loss, train_op=train_op, eval_metric_ops=eval_metric_ops,
        training_chief_hooks=training_chief_hooks, training_hooks=training_hooks, scaffold=scaffold,
    )  # fmt: skip


def build_parsing_serving_input_fn(feature_spec, default_batch_size=None):
    """Returns a function that returns `InputFnOps`: features parsed from a placeholder for serialised tf.Examples."""

    def input_fn():
        examples = tf.placeholder(tf.string, [default_batch_size], name="input_example_tensor")
        return InputFnOps(tf.parse_example(examples, feature_spec), None, {"examples": examples})

    return input_fn


def infer_real_valued_columns_from_input(x):
    """Returns a list with one numeric feature column for a matrix of features."""
    return [tf.feature_column.numeric_column("", shape=(x.shape[1],))]


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
