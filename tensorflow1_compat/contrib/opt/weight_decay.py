"""Defines decoupled weight decay (Loshchilov and Hutter: Decoupled Weight Decay Regularization)."""

from __future__ import annotations

import tensorflow.compat.v1 as tf


class DecoupledWeightDecayExtension:
    """A mixin that subtracts `weight_decay * var` from weights at each step; list it before the optimizer class.

    The decay is not multiplied by the learning rate. With a sparse gradient, only rows with a gradient decay.

    Args:
      weight_decay: number, tensor, or function without arguments.
      *args, **kwargs: arguments of the optimizer.
    """

    def __init__(self, weight_decay, *args, **kwargs):
        self._weight_decay = weight_decay
        self._decayed_names = None
        super().__init__(*args, **kwargs)

    def minimize(self, loss, global_step=None, var_list=None, *args, decay_var_list=None, **kwargs):
        """Calls `minimize` of the optimizer; the variables in `decay_var_list` decay (default: all variables)."""
        self._set_decayed_variables(decay_var_list)
        return super().minimize(loss, global_step, var_list, *args, **kwargs)

    def apply_gradients(self, grads_and_vars, global_step=None, name=None, decay_var_list=None):
        """Calls `apply_gradients` of the optimizer; the variables in `decay_var_list` decay (default: all)."""
        if decay_var_list is not None or self._decayed_names is None:
            self._set_decayed_variables(decay_var_list)
        return super().apply_gradients(grads_and_vars, global_step=global_step, name=name)

    def _set_decayed_variables(self, decay_var_list):
        self._decayed_names = None if decay_var_list is None else {var.name for var in decay_var_list}

    def _decay_weights(self, var, indices=None):
        if self._decayed_names is not None and var.name not in self._decayed_names:
            return tf.no_op()
        rate = self._weight_decay() if callable(self._weight_decay) else self._weight_decay
        rate = tf.cast(rate, var.dtype.base_dtype)
        if indices is None:
            return tf.assign_sub(var, rate * var, use_locking=self._use_locking).op
        rows = tf.gather(var, indices)
        return tf.group(tf.scatter_sub(var, indices, rate * rows, use_locking=self._use_locking))

    def _apply_dense(self, grad, var):
        with tf.control_dependencies([self._decay_weights(var)]):
            return super()._apply_dense(grad, var)

    def _resource_apply_dense(self, grad, var):
        with tf.control_dependencies([self._decay_weights(var)]):
            return super()._resource_apply_dense(grad, var)

    def _apply_sparse(self, grad, var):
        with tf.control_dependencies([self._decay_weights(var, grad.indices)]):
            return super()._apply_sparse(grad, var)

    def _resource_apply_sparse(self, grad, var, indices):
        with tf.control_dependencies([self._decay_weights(var, indices)]):
            return super()._resource_apply_sparse(grad, var, indices)


def extend_with_decoupled_weight_decay(base_optimizer):
    """Returns a subclass with weight decay; `weight_decay` is the first argument, before the optimizer's arguments."""

    class OptimizerWithDecoupledWeightDecay(DecoupledWeightDecayExtension, base_optimizer):
        __doc__ = DecoupledWeightDecayExtension.__doc__

        def __init__(self, weight_decay, *args, **kwargs):
            super().__init__(weight_decay, *args, **kwargs)

    return OptimizerWithDecoupledWeightDecay


class AdamWOptimizer(DecoupledWeightDecayExtension, tf.train.AdamOptimizer):
    """An Adam optimizer with decoupled weight decay."""

    def __init__(
        self, weight_decay, learning_rate=0.001, beta1=0.9, beta2=0.999, epsilon=1e-8, use_locking=False, name="AdamW"
    ):
        super().__init__(
            weight_decay, learning_rate=learning_rate, beta1=beta1, beta2=beta2, epsilon=epsilon,
            use_locking=use_locking, name=name,
        )  # fmt: skip


class MomentumWOptimizer(DecoupledWeightDecayExtension, tf.train.MomentumOptimizer):
    """A momentum optimizer with decoupled weight decay."""

    def __init__(self, weight_decay, learning_rate, momentum, use_locking=False, name="MomentumW", use_nesterov=False):
        super().__init__(
            weight_decay, learning_rate=learning_rate, momentum=momentum,
            use_locking=use_locking, name=name, use_nesterov=use_nesterov,
        )  # fmt: skip
