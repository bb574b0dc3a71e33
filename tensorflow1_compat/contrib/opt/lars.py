"""Layer-wise adaptive rate scaling (You, Gitman, Ginsburg: Large Batch Training of Convolutional Networks)."""

from __future__ import annotations

import tensorflow.compat.v1 as tf

from tensorflow1_compat.contrib.opt.updating import UpdatingOptimizer


class LARSOptimizer(UpdatingOptimizer):
    """Momentum whose rate is scaled for each variable by the ratio of the norms of weights and gradients.

    Args:
      learning_rate: number or tensor.
      momentum: of the slot `momentum`.
      weight_decay: added to the gradient, and to its norm.
      eeta: the trust coefficient.
      epsilon: added to the divisor.
      skip_list: parts of variable names (`["bias", "beta"]`); these variables get plain momentum.
      use_nesterov: Nesterov's momentum.

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
        """Returns the scaled rate, and the gradient with weight decay."""
        rate = self._number("learning_rate", self._learning_rate, var)
        if self._skip_list is not None and any(part in var.name for part in self._skip_list):
            return rate, grad
        weight_norm, grad_norm = tf.norm(var, ord=2), tf.norm(grad, ord=2)
        one = tf.ones_like(weight_norm)
        ratio = self._eeta * weight_norm / (grad_norm + self._weight_decay * weight_norm + self._epsilon)
        trusted = tf.where(weight_norm > 0, tf.where(grad_norm > 0, ratio, one), one)
        return rate * trusted, grad + self._weight_decay * var

    def _step(self, var, grad):
        rate, grad = self.compute_lr(grad, var)
        momentum = self._number("momentum", self._momentum, var)
        slot = self.get_slot(var, "momentum")
        moved = tf.assign(slot, slot * momentum + grad * rate, use_locking=self._use_locking)
        step = moved * momentum + grad * rate if self._use_nesterov else moved
        return tf.assign_sub(var, step, use_locking=self._use_locking).op

    def _sparse_step(self, var, grad, indices):
        """Updates rows with plain momentum: the norm of a part says nothing about the layer."""
        rate, momentum = self._number("rate", self._learning_rate, var), self._number("momentum", self._momentum, var)
        slot = self.get_slot(var, "momentum")
        rows = tf.gather(slot, indices) * momentum + grad
        step = rows * momentum + grad if self._use_nesterov else rows
        return tf.group(
            tf.scatter_update(slot, indices, rows, use_locking=self._use_locking),
            tf.scatter_sub(var, indices, rate * step, use_locking=self._use_locking),
        )
