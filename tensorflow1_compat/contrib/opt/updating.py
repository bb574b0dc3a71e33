"""Defines a base class for optimizers whose update works for both reference and resource variables."""

from __future__ import annotations

import tensorflow.compat.v1 as tf


class UpdatingOptimizer(tf.train.Optimizer):
    """A base class of optimizers that define their update in TensorFlow operators.

    Subclasses define `_step(var, grad)`, which updates a whole variable, and optionally `_sparse_step(var, grad,
    indices)`, which updates rows with unique indices. Without `_sparse_step`, sparse gradients are made dense.
    """

    def _step(self, var, grad):
        raise NotImplementedError

    def _sparse_step(self, var, grad, indices):
        return self._step(var, tf.scatter_nd(indices[:, None], grad, tf.shape(var, out_type=indices.dtype)))

    def _apply_dense(self, grad, var):
        return self._step(var, grad)

    def _resource_apply_dense(self, grad, handle):
        return self._step(handle, grad)

    def _apply_sparse(self, grad, var):
        return self._sparse_step(var, grad.values, grad.indices)

    def _resource_apply_sparse(self, grad, handle, indices):
        return self._sparse_step(handle, grad, indices)

    def _cast_hyperparameter(self, name: str, value, var) -> tf.Tensor:
        """Returns a hyperparameter (a number, tensor or function without arguments) in the dtype of a variable."""
        value = self._call_if_callable(value)
        return tf.cast(tf.convert_to_tensor(value, name=name), var.dtype.base_dtype)
