"""`tf.contrib.metrics`, `losses`, `tf.metrics`, `tf.losses`: values and update operators after three batches."""

from __future__ import annotations

# fmt: off
# A table: a line for each case, if it fits.
import numpy as np
import tensorflow as tf
from common import Run, case, ids, rand, wrong, x

metrics, losses = tf.contrib.metrics, tf.contrib.losses


def batches(kind):
    """A tensor that is another batch of four at each step."""
    source = rand(kind)
    values = {
        "labels": source.randint(0, 2, (3, 4)).astype(np.float32), "classes": source.randint(0, 3, (3, 4)),
        "guesses": source.randint(0, 3, (3, 4)), "shares": source.uniform(0, 1, (3, 4)).astype(np.float32),
        "weights": source.uniform(0.5, 2, (3, 4)).astype(np.float32), "bools": source.randint(0, 2, (3, 4)) > 0,
        "others": source.randint(0, 2, (3, 4)) > 0, "scores": source.standard_normal((3, 4, 3)).astype(np.float32),
        "column": source.randint(0, 3, (3, 4, 1)), "vectors": source.standard_normal((3, 4, 3)).astype(np.float32),
        "top": np.argsort(source.standard_normal((3, 4, 3)))[:, :, :2],
    }[kind]
    step = [var for var in tf.global_variables() if var.op.name == "step"]
    step = step[0] if step else tf.get_variable("step", [], tf.int32, tf.zeros_initializer(), trainable=False)
    batch = tf.gather(tf.constant(values), step % 3)
    batch.set_shape(values.shape[1:])
    return batch


def streamed(function, *kinds, **options):
    weighted = options.pop("weighted", False)
    arguments = [batches(kind) for kind in kinds]
    if weighted:
        options["weights"] = batches("weights")
    value, update = function(*arguments, **options)
    step = [var for var in tf.global_variables() if var.op.name == "step"][0]
    with tf.control_dependencies([each for each in tf.contrib.framework.nest.flatten(update) if each is not None]):
        return Run([update, tf.assign_add(step, 1)], 3, [value])


_TWO = ("bools", "others")
_AT = {"thresholds": [0.2, 0.5, 0.8]}
_STREAMING = (
    ("streaming_accuracy", ("guesses", "classes"), {}), ("streaming_auc", ("shares", "labels"), {"num_thresholds": 11}),
    ("streaming_auc", ("shares", "labels"), {"num_thresholds": 11, "curve": "PR"}), ("streaming_mean", ("shares",), {}),
    ("streaming_mean_tensor", ("shares",), {}), ("streaming_false_negatives", _TWO, {}),
    ("streaming_false_positives", _TWO, {}), ("streaming_true_negatives", _TWO, {}), ("streaming_true_positives", _TWO,
        {}),
    ("streaming_false_negatives_at_thresholds", ("shares", "bools"), _AT),
    ("streaming_false_positives_at_thresholds", ("shares", "bools"), _AT),
    ("streaming_true_negatives_at_thresholds", ("shares", "bools"), _AT),
    ("streaming_true_positives_at_thresholds", ("shares", "bools"), _AT),
    ("streaming_false_negative_rate", _TWO, {}), ("streaming_false_positive_rate", _TWO, {}),
    ("streaming_false_negative_rate_at_thresholds", ("shares", "labels"), _AT),
    ("streaming_false_positive_rate_at_thresholds", ("shares", "labels"), _AT), ("streaming_precision", _TWO, {}),
    ("streaming_recall", _TWO, {}), ("streaming_precision_at_thresholds", ("shares", "labels"), _AT),
    ("streaming_recall_at_thresholds", ("shares", "labels"), _AT),
    ("streaming_sensitivity_at_specificity", ("shares", "labels"), {"specificity": 0.6, "num_thresholds": 11}),
    ("streaming_specificity_at_sensitivity", ("shares", "labels"), {"sensitivity": 0.6, "num_thresholds": 11}),
    ("streaming_mean_absolute_error", ("shares", "labels"), {}), ("streaming_mean_squared_error", ("shares", "labels"),
        {}),
    ("streaming_root_mean_squared_error", ("shares", "labels"), {}),
    ("streaming_mean_relative_error", ("shares", "labels", "weights"), {}),
    ("streaming_percentage_less", ("shares",), {"threshold": 0.5}), ("streaming_recall_at_k", ("scores", "classes"),
        {"k": 2}),
    ("streaming_mean_iou", ("guesses", "classes"), {"num_classes": 3}), ("cohen_kappa", ("guesses", "classes"), {
        "num_classes": 3}), ("f1_score", ("labels", "shares"), {"num_thresholds": 11}),
    ("precision_at_recall", ("labels", "shares"), {"target_recall": 0.5, "num_thresholds": 11}),
    ("recall_at_precision", ("labels", "shares"), {"precision": 0.5, "num_thresholds": 11}),
    ("streaming_curve_points", ("labels", "shares"), {"num_thresholds": 11}), ("streaming_covariance", (
        "shares", "labels"), {}), ("streaming_pearson_correlation", ("shares", "labels"), {}),
    ("precision_recall_at_equal_thresholds", ("bools", "shares"), {"num_thresholds": 11}),
)
_NO_WEIGHTS = ("precision_recall_at_equal_thresholds",)
for _name, _kinds, _options in _STREAMING:
    case(f"metrics.{_name}: {sorted(_options)}", lambda n=_name, k=_kinds, o=_options: streamed(
        getattr(metrics, n), *k, **o))
    if _name not in _NO_WEIGHTS:
        case(f"metrics.{_name}: weights {sorted(_options)}", lambda n=_name, k=_kinds, o=_options: streamed(
            getattr(metrics, n), *k, weighted=True, **o))
for _name, _kinds, _options in (
    ("count", ("shares",), {}), ("streaming_concat", ("shares",), {}), ("streaming_dynamic_auc", ("labels", "shares"),
        {}),
    ("auc_with_confidence_intervals", ("labels", "shares"), {}), ("auc_using_histogram", ("bools", "shares"), {
        "score_range": [0.0, 1.0], "nbins": 10}),
    ("streaming_mean_cosine_distance", ("vectors", "scores"), {"dim": 1}),
    ("streaming_sparse_average_precision_at_k", ("scores", "column"), {"k": 2}),
    ("streaming_sparse_precision_at_k", ("scores", "column"), {"k": 2}), ("streaming_sparse_precision_at_k", (
        "scores", "column"), {"k": 2, "class_id": 1}), ("streaming_sparse_recall_at_k", ("scores", "column"), {"k": 2}),
    ("streaming_sparse_average_precision_at_top_k", ("top", "column"), {}),
    ("streaming_sparse_precision_at_top_k", ("top", "column"), {}), ("sparse_recall_at_top_k", ("column", "top"), {}),
):
    case(f"metrics.{_name}: {sorted(_options)}", lambda n=_name, k=_kinds, o=_options: streamed(
        getattr(metrics, n), *k, **o))
for _name, _kinds, _options in (
    ("accuracy", ("classes", "guesses"), {}), ("auc", ("labels", "shares"), {"num_thresholds": 11}),
    ("auc", ("labels", "shares"), {"num_thresholds": 11, "curve": "PR", "summation_method": "careful_interpolation"}),
    ("mean", ("shares",), {}), ("mean_tensor", ("shares",), {}), ("false_negatives", _TWO, {}),
    ("false_positives_at_thresholds", ("bools", "shares"), _AT), ("precision", _TWO, {}), ("recall", _TWO, {}),
    ("precision_at_k", ("column", "scores"), {"k": 2}), ("recall_at_k", ("column", "scores"), {"k": 2}),
    ("average_precision_at_k", ("column", "scores"), {"k": 2}), ("mean_absolute_error", ("labels", "shares"), {}),
    ("mean_cosine_distance", ("vectors", "scores"), {"dim": 1}), ("mean_iou", ("classes", "guesses"),
        {"num_classes": 3}),
    ("mean_per_class_accuracy", ("classes", "guesses"), {"num_classes": 3}), ("mean_relative_error", (
        "labels", "shares", "weights"), {}), ("mean_squared_error", ("labels", "shares"), {}),
    ("percentage_below", ("shares",), {"threshold": 0.5}), ("precision_at_thresholds", ("bools", "shares"), _AT),
    ("recall_at_thresholds", ("bools", "shares"), _AT), ("root_mean_squared_error", ("labels", "shares"), {}),
    ("sensitivity_at_specificity", ("bools", "shares"), {"specificity": 0.6, "num_thresholds": 11}),
    ("specificity_at_sensitivity", ("bools", "shares"), {"sensitivity": 0.6, "num_thresholds": 11}),
):
    case(f"metrics.{_name}: tf.metrics {sorted(_options)}", lambda n=_name, k=_kinds, o=_options: streamed(
        getattr(tf.metrics, n), *k, **o))
case("metrics.accuracy", lambda: metrics.accuracy(ids(2, 3), ids(2, 3, seed=1)))
case("metrics.accuracy: weights", lambda: metrics.accuracy(ids(2, 3), ids(2, 3, seed=1), x(2, 3)))
case("metrics.confusion_matrix", lambda: metrics.confusion_matrix(ids(6), ids(6, seed=1), num_classes=5))
case("metrics.aggregate_metrics", lambda: metrics.aggregate_metrics(*[tf.metrics.mean(x(3)) for _ in range(2)]))
case("metrics.aggregate_metric_map", lambda: metrics.aggregate_metric_map({"a": tf.metrics.mean(x(3))}))
for _name in ("set_difference", "set_intersection", "set_union"):
    case("metrics." + _name, lambda n=_name: getattr(metrics, n)(ids(2, 3), ids(2, 3, seed=1)))
case("metrics.set_size", lambda: metrics.set_size(tf.contrib.layers.dense_to_sparse(ids(2, 3))))
wrong("metrics.accuracy", lambda: metrics.accuracy(ids(2, 3), ids(3)))
wrong("metrics.accuracy: dtypes", lambda: metrics.accuracy(ids(2, 3), x(2, 3)))
wrong("metrics.streaming_auc", lambda: metrics.streaming_auc(x(4, low=0, high=1), ids(4, below=2), curve="x"))
wrong("metrics.streaming_mean_iou", lambda: metrics.streaming_mean_iou(ids(3), ids(4), 3))
wrong("metrics.aggregate_metrics", lambda: metrics.aggregate_metrics())

# Losses.
_PAIR = lambda: (x(4, 3), x(4, 3, seed=1))  # noqa: E731
for _name, _make in (
    ("absolute_difference", _PAIR), ("hinge_loss", lambda: (x(4, 3), tf.cast(ids(4, 3, below=2), tf.float32))),
    ("log_loss", lambda: (x(4, 3, low=0.1, high=0.9), tf.cast(ids(4, 3, below=2), tf.float32))),
    ("mean_pairwise_squared_error", _PAIR), ("mean_squared_error", _PAIR),
    ("sigmoid_cross_entropy", lambda: (x(4, 3), tf.cast(ids(4, 3, below=2), tf.float32))),
    ("softmax_cross_entropy", lambda: (x(4, 3), tf.one_hot(ids(4, below=3), 3))),
    ("sparse_softmax_cross_entropy", lambda: (x(4, 3), ids(4, below=3))),
):
    case("losses." + _name, lambda n=_name, m=_make: [getattr(losses, n)(*m()), losses.get_losses()])
    if _name != "hinge_loss":
        case(f"losses.{_name}: weights", lambda n=_name, m=_make: [
            getattr(losses, n)(*m(), weights=tf.constant([[0.5], [0.0], [2.0], [1.0]]) if (
                "softmax" not in n) else tf.constant([0.5, 0, 2, 1])), losses.get_losses()])
    _there = {"hinge_loss": "hinge_loss"}.get(_name, _name)
    for _reduction in ("none", "weighted_sum", "weighted_mean", "weighted_sum_over_batch_size"):
        if _name != "mean_pairwise_squared_error":
            case(f"losses.{_there}: tf.losses {_reduction}", lambda n=_there, m=_make, r=_reduction: getattr(
                tf.losses, n)(*reversed(m()), reduction=r))
for _options in ({"label_smoothing": 0.1},):
    case("losses.softmax_cross_entropy: smooth", lambda o=_options: losses.softmax_cross_entropy(
        x(4, 3), tf.one_hot(ids(4, below=3), 3), **o))
    case("losses.sigmoid_cross_entropy: smooth", lambda o=_options: losses.sigmoid_cross_entropy(
        x(4, 3), tf.one_hot(ids(4, below=3), 3), **o))
case("losses.cosine_distance", lambda: losses.cosine_distance(*_PAIR(), axis=1))
case("losses.cosine_distance: tf.losses", lambda: tf.losses.cosine_distance(*_PAIR(), axis=1))
case("losses.huber_loss: tf.losses", lambda: tf.losses.huber_loss(*_PAIR(), delta=0.5))
case("losses.mean_pairwise_squared_error: tf.losses", lambda: tf.losses.mean_pairwise_squared_error(*_PAIR()))
case("losses.compute_weighted_loss", lambda: losses.compute_weighted_loss(x(4, 3), tf.constant([[0.5], [0], [1], [2]])))
case("losses.compute_weighted_loss: number", lambda: losses.compute_weighted_loss(x(4, 3), 0.3))
case("losses.add_loss losses.get_losses losses.get_regularization_losses losses.get_total_loss", lambda: [
    losses.add_loss(tf.constant(1.5)), losses.get_losses(), losses.get_regularization_losses(),
    losses.get_total_loss()])
wrong("losses.mean_squared_error", lambda: losses.mean_squared_error(x(4, 3), x(3)))
wrong("losses.mean_squared_error: None", lambda: losses.mean_squared_error(None, x(3)))
wrong("losses.cosine_distance", lambda: losses.cosine_distance(*_PAIR()))
_deep = tf.contrib.losses.metric_learning
for _name, _make in (
    ("contrastive_loss", lambda: (tf.constant([1, 0, 1, 0]), x(4, 3), x(4, 3, seed=1))),
    ("triplet_semihard_loss", lambda: (tf.constant([0, 0, 1, 1]), x(4, 3))),
    ("lifted_struct_loss", lambda: (tf.constant([0, 0, 1, 1]), x(4, 3))),
    ("npairs_loss", lambda: (tf.constant([0, 1, 2, 3]), x(4, 3), x(4, 3, seed=1))),
):
    case("losses.metric_learning." + _name, lambda n=_name, m=_make: getattr(_deep, n)(*m()))
