"""Defines optimizers that wrap another optimizer: average weights, clip weights, alternate between losses."""

from __future__ import annotations

import types

import tensorflow.compat.v1 as tf

from npu_bridge.base.tf_internals.contrib import has_own_update


class WrappingOptimizer(tf.train.Optimizer):
    """An optimizer that delegates gradients and slots to an inner optimizer."""

    def __init__(self, optimizer, use_locking, name):
        super().__init__(use_locking, name)
        self._optimizer = optimizer

    def compute_gradients(self, *args, **kwargs):
        return self._optimizer.compute_gradients(*args, **kwargs)

    def get_slot(self, *args, **kwargs):
        return self._optimizer.get_slot(*args, **kwargs)

    def get_slot_names(self, *args, **kwargs):
        return self._optimizer.get_slot_names(*args, **kwargs)


class MovingAverageOptimizer(WrappingOptimizer):
    """An optimizer that keeps moving averages of the weights during training.

    Args:
      opt: the optimizer that trains.
      average_decay: decay of `tf.train.ExponentialMovingAverage`.
      num_updates: number of updates so far, which lowers the decay of the first steps.
      sequential_update: whether to average after each update, rather than in parallel with it.

    Graph: `<variable>/ExponentialMovingAverage` for each trained variable.
    """

    def __init__(self, opt, average_decay=0.9999, num_updates=None, sequential_update=True):
        super().__init__(opt, False, "MovingAverageOptimizer")
        self._sequential_update = sequential_update
        self._ema = tf.train.ExponentialMovingAverage(average_decay, num_updates=num_updates)
        self._swapped_variable_name_map = None

    def apply_gradients(self, grads_and_vars, global_step=None, name=None):
        """Applies gradients with the inner optimizer, and updates the moving averages."""
        grads_and_vars = list(grads_and_vars)
        train_op = self._optimizer.apply_gradients(grads_and_vars, global_step=global_step, name=name)
        trained = [var for grad, var in grads_and_vars if grad is not None]
        with tf.control_dependencies([train_op] if self._sequential_update else []):
            averages = self._ema.apply(trained)
        self._swapped_variable_name_map = {var.op.name: self._ema.average(var).op.name for var in trained}
        return tf.group(train_op, averages, name="train_with_avg")

    def swapping_saver(self, var_list=None, name="swapping_saver", **kwargs):
        """Returns a Saver that saves averages under the names of weights, and weights under the names of averages.

        Raises:
          RuntimeError: `apply_gradients` or `minimize` was not called before.
        """
        if self._swapped_variable_name_map is None:
            raise RuntimeError("MovingAverageOptimizer: call apply_gradients() or minimize() before swapping_saver().")
        by_name = dict(var_list) if isinstance(var_list, dict) else {
            var.op.name: var for var in (var_list or tf.global_variables())
        }  # fmt: skip
        for name_of_var, name_of_average in self._swapped_variable_name_map.items():
            if name_of_var in by_name and name_of_average not in by_name:
                raise ValueError(f"MovingAverageOptimizer: Variable to swap {name_of_average} is not in var_list.")
            if name_of_var in by_name:
                by_name[name_of_var], by_name[name_of_average] = by_name[name_of_average], by_name[name_of_var]
        return tf.train.Saver(by_name, name=name, **kwargs)

    def variables(self):
        """Returns the variables of the inner optimizer."""
        return self._optimizer.variables()


class VariableClippingOptimizer(WrappingOptimizer):
    """An optimizer that clips weights to a norm after each update.

    Args:
      opt: the optimizer that trains.
      vars_to_clip_dims: variable -> list of the axes over which the variable's norm is computed.
      max_norm: the largest allowed norm of a weight.
    """

    def __init__(
        self, opt, vars_to_clip_dims, max_norm, use_locking=False, colocate_clip_ops_with_vars=False,
        name="VariableClipping",
    ):  # fmt: skip
        super().__init__(opt, use_locking, name)
        self._max_norm = max_norm
        clipped = vars_to_clip_dims.items() if hasattr(vars_to_clip_dims, "items") else vars_to_clip_dims
        self._axes = {var.name: axes for var, axes in clipped}

    def apply_gradients(self, grads_and_vars, global_step=None, name=None):
        """Applies gradients with the inner optimizer, then clips the weights."""
        grads_and_vars = list(grads_and_vars)
        with tf.name_scope(name, self._name):
            update = self._optimizer.apply_gradients(grads_and_vars, global_step=global_step)
            with tf.control_dependencies([update]):
                return tf.group(*(self._clip(grad, var) for grad, var in grads_and_vars if var.name in self._axes))

    def _clip(self, grad, var):
        axes = self._axes[var.name]
        if isinstance(grad, tf.IndexedSlices) and 0 not in axes:
            rows = tf.unique(grad.indices).y
            return tf.group(tf.scatter_update(var, rows, tf.clip_by_norm(tf.gather(var, rows), self._max_norm, axes)))
        return tf.assign(var, tf.clip_by_norm(tf.identity(var), self._max_norm, axes), use_locking=self._use_locking).op


class MultitaskOptimizerWrapper(WrappingOptimizer):
    """An optimizer that does not update a variable and its slots in steps in which the variable's gradient is zero.

    Use it to alternate between losses: momentum would otherwise change weights that the current loss does not use.

    Raises:
      TypeError: `opt` is not an optimizer, or delegates updates to another optimizer.
    """

    def __init__(self, opt):
        if not isinstance(opt, tf.train.Optimizer):
            raise TypeError(f"MultitaskOptimizerWrapper: expected a tf.train.Optimizer; got {type(opt).__name__}.")
        if not has_own_update(opt):
            outer = type(opt).__name__
            raise TypeError(
                f"MultitaskOptimizerWrapper: expected an optimizer that updates variables itself; got {outer}, which "
                f"calls another optimizer. Put the wrapper inside: {outer}(MultitaskOptimizerWrapper(opt))."
            )
        super().__init__(opt, False, "MultitaskOptimizerWrapper")
        self._opt = opt
        for kind in ("_apply_dense", "_resource_apply_dense", "_apply_sparse_duplicate_indices",
                     "_resource_apply_sparse_duplicate_indices"):  # fmt: skip
            setattr(opt, kind, types.MethodType(_skip_zero_gradients(getattr(opt, kind)), opt))

    def apply_gradients(self, *args, **kwargs):
        """Calls the inner optimizer."""
        return self._opt.apply_gradients(*args, **kwargs)

    def variables(self):
        """Returns the variables of the inner optimizer."""
        return self._opt.variables()

    def __getattr__(self, name):
        if name == "_opt":
            raise AttributeError(name)  # while an object is copied
        return getattr(self._opt, name)


def _skip_zero_gradients(update):
    def update_unless_zero(self, grad, *args, **kwargs):
        values = grad.values if isinstance(grad, tf.IndexedSlices) else grad
        is_used = tf.reduce_any(tf.not_equal(values, 0))
        return tf.cond(is_used, lambda: tf.group(update(grad, *args, **kwargs)), tf.no_op)

    return update_unless_zero


def clip_gradients_by_global_norm(gradients_variables, clip_norm=20.0):
    """Clips gradients by their global norm; returns (pairs, norm) with (gradient, variable) pairs. None stays None."""
    gradients, variables = zip(*gradients_variables)
    clipped, norm = tf.clip_by_global_norm(gradients, clip_norm)
    return list(zip(clipped, variables)), norm
