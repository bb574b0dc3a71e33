"""Defines variants of Adam: lazy Adam for sparse gradients, Adam with Nesterov's momentum, and AdaMax."""

from __future__ import annotations

import tensorflow.compat.v1 as tf

from npu_bridge.base.tf_internals.training import adam_hyperparameters
from tensorflow1_compat.contrib.opt.updating import UpdatingOptimizer


def _corrected_rate(optimizer, var):
    """Returns Adam's learning rate with both bias corrections, in the dtype of the variable."""
    numbers = _make_apply_arguments(optimizer, var)
    return numbers["lr"] * tf.sqrt(1 - numbers["beta2_power"]) / (1 - numbers["beta1_power"])


def _make_apply_arguments(optimizer, var):
    """Returns the scalar arguments of `tf.raw_ops.ApplyAdam` by name, in the dtype of the variable."""
    return {name: tf.cast(number, var.dtype.base_dtype) for name, number in adam_hyperparameters(optimizer).items()}


class LazyAdamOptimizer(tf.train.AdamOptimizer):
    """An Adam optimizer that updates only rows with a gradient, for large embeddings.

    The results differ from `AdamOptimizer`, which decays the moments of all rows at every step.
    """

    def _update_rows(self, var, grad, indices):
        numbers = _make_apply_arguments(self, var)
        beta1, beta2, epsilon = numbers["beta1"], numbers["beta2"], numbers["epsilon"]
        m, v = self.get_slot(var, "m"), self.get_slot(var, "v")
        m_rows = beta1 * tf.gather(m, indices) + (1 - beta1) * grad
        v_rows = beta2 * tf.gather(v, indices) + (1 - beta2) * tf.square(grad)
        step = _corrected_rate(self, var) * m_rows / (tf.sqrt(v_rows) + epsilon)
        return tf.group(
            tf.scatter_update(m, indices, m_rows, use_locking=self._use_locking),
            tf.scatter_update(v, indices, v_rows, use_locking=self._use_locking),
            tf.scatter_sub(var, indices, step, use_locking=self._use_locking),
        )

    def _apply_sparse(self, grad, var):
        return self._update_rows(var, grad.values, grad.indices)

    def _resource_apply_sparse(self, grad, var, indices):
        return self._update_rows(var, grad, indices)


class NadamOptimizer(tf.train.AdamOptimizer):
    """An Adam optimizer with Nesterov's momentum."""

    def _apply_dense(self, grad, var):
        m, v = self.get_slot(var, "m"), self.get_slot(var, "v")
        return tf.raw_ops.ApplyAdam(
            var=var,
            m=m,
            v=v,
            grad=grad,
            **_make_apply_arguments(self, var),
            use_locking=self._use_locking,
            use_nesterov=True,
        ).op

    def _resource_apply_dense(self, grad, var):
        m, v = self.get_slot(var, "m"), self.get_slot(var, "v")
        return tf.raw_ops.ResourceApplyAdam(
            var=var.handle, m=m.handle, v=v.handle, grad=grad, **_make_apply_arguments(self, var),
            use_locking=self._use_locking, use_nesterov=True,
        )  # fmt: skip

    def _apply_sparse_shared(self, grad, var, indices, scatter_add):
        numbers = _make_apply_arguments(self, var)
        beta1, beta2, epsilon = numbers["beta1"], numbers["beta2"], numbers["epsilon"]
        m, v = self.get_slot(var, "m"), self.get_slot(var, "v")
        m_part, v_part = grad * (1 - beta1), tf.square(grad) * (1 - beta2)
        m_new = tf.assign(m, m * beta1, use_locking=self._use_locking)
        with tf.control_dependencies([m_new]):
            m_new = scatter_add(m, indices, m_part)
            m_bar = tf.scatter_nd(indices[:, None], m_part, tf.shape(m, out_type=indices.dtype)) + beta1 * m_new
        v_new = tf.assign(v, v * beta2, use_locking=self._use_locking)
        with tf.control_dependencies([v_new]):
            v_new = scatter_add(v, indices, v_part)
        step = _corrected_rate(self, var) * m_bar / (tf.sqrt(v_new) + epsilon)
        return tf.group(tf.assign_sub(var, step, use_locking=self._use_locking), m_bar, v_new)


class AdaMaxOptimizer(UpdatingOptimizer):
    """An Adam optimizer that uses the largest recent gradient in place of the second moment.

    `v = max(beta2 * v, |g|)`, `var -= learning_rate / (1 - beta1^t) * m / (v + epsilon)`. The slots are `m` and `v`.
    The optimizer also has the variable `beta1_power`. Rows without a gradient do not change.
    """

    def __init__(self, learning_rate=0.001, beta1=0.9, beta2=0.999, epsilon=1e-8, use_locking=False, name="AdaMax"):
        super().__init__(use_locking, name)
        self._lr, self._beta1, self._beta2, self._epsilon = learning_rate, beta1, beta2, epsilon

    def _create_slots(self, var_list):
        first = min(var_list, key=lambda var: var.name)
        self._create_non_slot_variable(self._beta1, name="beta1_power", colocate_with=first)
        for var in var_list:
            self._zeros_slot(var, "m", self._name)
            self._zeros_slot(var, "v", self._name)

    def _get_beta_accumulators(self):
        graph = None if tf.executing_eagerly() else tf.get_default_graph()
        return self._get_non_slot_variable("beta1_power", graph=graph)

    def _list_hyperparameters_for(self, var):
        numbers = (("learning_rate", self._lr), ("beta1", self._beta1), ("beta2", self._beta2),
                   ("epsilon", self._epsilon))  # fmt: skip
        rate, beta1, beta2, epsilon = (self._cast_hyperparameter(name, number, var) for name, number in numbers)
        return rate / (1 - tf.cast(self._get_beta_accumulators(), var.dtype.base_dtype)), beta1, beta2, epsilon

    def _step(self, var, grad):
        rate, beta1, beta2, epsilon = self._list_hyperparameters_for(var)
        m, v = self.get_slot(var, "m"), self.get_slot(var, "v")
        m_new = tf.assign(m, beta1 * m + (1 - beta1) * grad, use_locking=self._use_locking)
        v_new = tf.assign(v, tf.maximum(beta2 * v, tf.abs(grad)), use_locking=self._use_locking)
        return tf.assign_sub(var, rate * m_new / (v_new + epsilon), use_locking=self._use_locking).op

    def _sparse_step(self, var, grad, indices):
        rate, beta1, beta2, epsilon = self._list_hyperparameters_for(var)
        m, v = self.get_slot(var, "m"), self.get_slot(var, "v")
        m_rows = beta1 * tf.gather(m, indices) + (1 - beta1) * grad
        v_rows = tf.maximum(beta2 * tf.gather(v, indices), tf.abs(grad))
        return tf.group(
            tf.scatter_update(m, indices, m_rows, use_locking=self._use_locking),
            tf.scatter_update(v, indices, v_rows, use_locking=self._use_locking),
            tf.scatter_sub(var, indices, rate * m_rows / (v_rows + epsilon), use_locking=self._use_locking),
        )

    def _finish(self, update_ops, name_scope):
        with tf.control_dependencies(update_ops):
            power = self._get_beta_accumulators()
            moved = tf.assign(power, power * self._beta1, use_locking=self._use_locking)
        return tf.group(*update_ops, moved, name=name_scope)
