"""`tf.contrib.estimator`: heads, hooks and metrics around estimators."""

from __future__ import annotations

import tensorflow.compat.v1 as tf
from tensorflow.compat.v1.estimator import (
    BaselineEstimator,
    DNNEstimator,
    DNNLinearCombinedEstimator,
    LinearEstimator,
    add_metrics,
)
from tensorflow.compat.v1.estimator import BinaryClassHead as binary_classification_head
from tensorflow.compat.v1.estimator import LogisticRegressionHead as logistic_regression_head
from tensorflow.compat.v1.estimator import MultiClassHead as multi_class_head
from tensorflow.compat.v1.estimator import MultiHead as multi_head
from tensorflow.compat.v1.estimator import MultiLabelHead as multi_label_head
from tensorflow.compat.v1.estimator import PoissonRegressionHead as poisson_regression_head
from tensorflow.compat.v1.estimator import RegressionHead as regression_head
from tensorflow.compat.v1.estimator.experimental import (
    InMemoryEvaluatorHook,
    build_raw_supervised_input_receiver_fn,
    call_logit_fn,
    dnn_logit_fn_builder,
    linear_logit_fn_builder,
    make_early_stopping_hook,
    make_stop_at_checkpoint_step_hook,
    stop_if_higher_hook,
    stop_if_lower_hook,
    stop_if_no_decrease_hook,
    stop_if_no_increase_hook,
)

from tensorflow1_compat.contrib.opt.wrappers import WrappingOptimizer


class _ClippingOptimizer(WrappingOptimizer):
    """An optimizer that applies a clipping function to gradients before the inner optimizer applies them."""

    def __init__(self, optimizer, clip):
        super().__init__(optimizer, False, "ClippingOptimizer")
        self._clip = clip

    def apply_gradients(self, grads_and_vars, global_step=None, name=None):
        """Applies clipped gradients with the inner optimizer."""
        used = [(grad, var) for grad, var in grads_and_vars if grad is not None]
        clipped = self._clip([grad for grad, _ in used])
        return self._optimizer.apply_gradients(list(zip(clipped, [var for _, var in used])), global_step, name)

    def variables(self):
        """Returns the variables of the inner optimizer."""
        return self._optimizer.variables()


def clip_gradients_by_norm(optimizer, clip_norm):
    """Returns an optimizer that clips the global norm of the gradients to `clip_norm`."""
    return _ClippingOptimizer(optimizer, lambda grads: tf.clip_by_global_norm(grads, clip_norm)[0])


def forward_features(estimator, keys=None, sparse_default_values=None):
    """Returns an estimator whose predictions also hold features of the input.

    Args:
      estimator: the estimator.
      keys: a feature name or a list of feature names; default: all features.
      sparse_default_values: feature name -> value that fills the missing elements of a sparse feature.
    """
    if isinstance(keys, str):
        keys = [keys]

    def model_fn(features, labels, mode, params, config):
        spec = estimator.model_fn(features, labels, mode, config)
        if mode != tf.estimator.ModeKeys.PREDICT:
            return spec
        predictions = dict(spec.predictions)
        for key in keys or list(features):
            feature = features[key]
            if isinstance(feature, tf.SparseTensor):
                feature = tf.sparse.to_dense(feature, (sparse_default_values or {}).get(key))
            if key in predictions:
                raise ValueError(f"forward_features: the predictions already have {key!r}.")
            predictions[key] = feature
        return spec._replace(predictions=predictions)

    return tf.estimator.Estimator(model_fn, estimator.model_dir, estimator.config, estimator.params)


def TowerOptimizer(optimizer_or_optimizer_fn):
    """Returns the optimizer unchanged: this package trains one tower in each process."""
    return optimizer_or_optimizer_fn() if callable(optimizer_or_optimizer_fn) else optimizer_or_optimizer_fn


def replicate_model_fn(model_fn, loss_reduction=None, devices=None):
    """Returns the model function unchanged: this package trains one tower in each process."""
    return model_fn
