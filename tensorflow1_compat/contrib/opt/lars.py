"""Defines the LARS optimizer (You, Gitman, Ginsburg: Large Batch Training of Convolutional Networks)."""

from __future__ import annotations

import tensorflow.compat.v1 as tf

from tensorflow1_compat.contrib.opt.updating import UpdatingOptimizer


class LARSOptimizer(UpdatingOptimizer):
    """A momentum optimizer that scales each variable's learning rate by the ratio of weight norm to gradient norm.

    Args:
      learning_rate: number or tensor.
      momentum: momentum coefficient.
      weight_decay: factor by which weights are added to the gradient, and the weight norm to the divisor of the ratio.
      eeta: the trust coefficient.
      epsilon: added to the divisor of the ratio.
      skip_list: parts of names (`["bias", "beta"]`); variables with such a name get plain momentum.
      use_nesterov: whether to use Nesterov's momentum.

    Raises:
      ValueError: momentum is negative.
    """

    def __init__(
        self, learning_rate, momentum=0.9, weight_decay=0.0001, eeta=0.001, epsilon=0.0,
        name="LARSOptimizer", skip_list=None, use_nesterov=False,
    ):  # fmt: skip
        if momentum < 0.0:
            raise ValueError(f"LARSOptimizer: momentum must not be negative; got {momentum}.")
        super().__init__(use_locking=False, name=name)
        self._learning_rate, self._momentum, self._weight_decay = learning_rate, momentum, weight_decay
        self._eeta, self._epsilon, self._skip_list, self._use_nesterov = eeta, epsilon, skip_list, use_nesterov

    def _create_slots(self, var_list):
        for var in var_list:
            self._zeros_slot(var, "momentum", self._name)

    def compute_lr(self, grad, var):
        """Returns the scaled learning rate, and the gradient with weight decay; both unchanged for `skip_list`."""
        rate = self._cast_hyperparameter("learning_rate", self._learning_rate, var)
        if self._skip_list is not None and any(part in var.name for part in self._skip_list):
            return rate, grad
        weight_norm, grad_norm = tf.norm(var, ord=2), tf.norm(grad, ord=2)
        one = tf.ones_like(weight_norm)
        ratio = self._eeta * weight_norm / (grad_norm + self._weight_decay * weight_norm + self._epsilon)
        trusted = tf.where(weight_norm > 0, tf.where(grad_norm > 0, ratio, one), one)
        return rate * trusted, grad + self._weight_decay * var

    def _step(self, var, grad):
        rate, grad = self.compute_lr(grad, var)
        momentum = self._cast_hyperparameter("momentum", self._momentum, var)
        slot = self.get_slot(var, "momentum")
        moved = tf.assign(slot, slot * momentum + grad * rate, use_locking=self._use_locking)
        step = moved * momentum + grad * rate if self._use_nesterov else moved
        return tf.assign_sub(var, step, use_locking=self._use_locking).op

    def _sparse_step(self, var, grad, indices):
        """Updates rows with plain momentum, because the norms of some rows say nothing about the whole layer."""
        rate, momentum = (
            self._cast_hyperparameter("rate", self._learning_rate, var),
            self._cast_hyperparameter("momentum", self._momentum, var),
        )
        slot = self.get_slot(var, "momentum")
        rows = tf.gather(slot, indices) * momentum + grad
        step = rows * momentum + grad if self._use_nesterov else rows
        return tf.group(
            tf.scatter_update(slot, indices, rows, use_locking=self._use_locking),
            tf.scatter_sub(var, indices, rate * step, use_locking=self._use_locking),
        )
