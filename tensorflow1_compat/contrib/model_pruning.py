"""`tf.contrib.model_pruning`: masks over the smallest weights of layers."""

from __future__ import annotations

import tensorflow.compat.v1 as tf

from tensorflow1_compat.contrib.training.hparam import HParams

_MASKS, _THRESHOLDS, _MASKED, _WEIGHTS = "masks", "thresholds", "masked_weights", "kernel"


def apply_mask(x, scope="", prune_option="weight"):
    """The weights `x` times a mask, the variable `<scope>/mask`; `<scope>/threshold` goes with it."""
    path = f"{scope}/" if scope else ""
    mask = tf.get_variable(path + "mask", x.shape, x.dtype.base_dtype, tf.ones_initializer(), trainable=False)
    threshold = tf.get_variable(path + "threshold", [], x.dtype.base_dtype, tf.zeros_initializer(), trainable=False)
    with tf.name_scope(scope or None, "mask"):
        masked = tf.multiply(mask, x, name="masked_weight")
    for name, each in ((_MASKS, mask), (_THRESHOLDS, threshold), (_MASKED, masked), (_WEIGHTS, x)):
        if not any(each is other for other in tf.get_collection(name)):
            tf.add_to_collection(name, each)
    return masked


def get_masks():
    """All masks of the graph."""
    return tf.get_collection(_MASKS)


def get_thresholds():
    """All thresholds of the graph."""
    return tf.get_collection(_THRESHOLDS)


def get_masked_weights():
    """All masked weights of the graph."""
    return tf.get_collection(_MASKED)


def get_weights():
    """All weights that have masks."""
    return tf.get_collection(_WEIGHTS)


def get_weight_sparsity():
    """The share of zeros of each mask."""
    return [tf.nn.zero_fraction(mask, name=mask.op.name + "/sparsity") for mask in get_masks()]


def get_pruning_hparams():
    """The settings of `Pruning` with the values they start with."""
    return HParams(
        name="model_pruning", begin_pruning_step=0, end_pruning_step=-1, threshold_decay=0.0, pruning_frequency=10,
        initial_sparsity=0.0, target_sparsity=0.5, sparsity_function_begin_step=0, sparsity_function_end_step=100,
        sparsity_function_exponent=3.0,
    )  # fmt: skip


class Pruning:
    """Raises the share of pruned weights along a polynomial over the steps.

    Args:
      spec: an HParams of `get_pruning_hparams`.
      global_step: default: the graph's.
    """

    def __init__(self, spec=None, global_step=None, sparsity=None):
        self._spec = spec or get_pruning_hparams()
        self._step = tf.cast(tf.train.get_or_create_global_step() if global_step is None else global_step, tf.int32)
        self._sparsity = self._sparsity_of_step() if sparsity is None else sparsity

    def _sparsity_of_step(self):
        spec = self._spec
        steps = spec.sparsity_function_end_step - spec.sparsity_function_begin_step
        done = tf.cast(self._step - spec.sparsity_function_begin_step, tf.float32) / max(1, steps)
        left = tf.pow(1 - tf.clip_by_value(done, 0.0, 1.0), spec.sparsity_function_exponent)
        return (spec.initial_sparsity - spec.target_sparsity) * left + spec.target_sparsity

    def mask_update_op(self):
        """An op that moves thresholds and masks."""
        updates = []
        for weight, mask, threshold in zip(get_weights(), get_masks(), get_thresholds()):
            sizes = tf.sort(tf.reshape(tf.abs(weight), [-1]))
            place = tf.cast(tf.cast(tf.size(sizes), tf.float32) * self._sparsity, tf.int32)
            limit = tf.gather(sizes, tf.clip_by_value(place, 0, tf.size(sizes) - 1))
            decay = self._spec.threshold_decay
            limit = decay * threshold + (1 - decay) * limit
            updates += [
                tf.assign(threshold, limit),
                tf.assign(mask, tf.cast(tf.abs(weight) >= limit, mask.dtype.base_dtype)),
            ]
        return tf.group(*updates)

    def conditional_mask_update_op(self):
        """`mask_update_op` in the steps in which it is due."""
        spec = self._spec
        since = self._step - spec.begin_pruning_step
        is_due = (since >= 0) & tf.equal(since % spec.pruning_frequency, 0)
        if spec.end_pruning_step >= 0:
            is_due &= self._step <= spec.end_pruning_step
        return tf.cond(is_due, self.mask_update_op, tf.no_op)

    def add_pruning_summaries(self):
        """Summaries of the wanted and the reached share."""
        tf.summary.scalar("sparsity", self._sparsity)
        for mask, share in zip(get_masks(), get_weight_sparsity()):
            tf.summary.scalar(mask.op.name + "/sparsity", share)
