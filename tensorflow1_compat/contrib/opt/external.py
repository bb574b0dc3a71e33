"""Defines optimizers that run outside of the graph: a call of `minimize` is a whole training."""

from __future__ import annotations

import importlib

import numpy as np
import tensorflow.compat.v1 as tf


class ExternalOptimizerInterface:
    """A base class of optimizers that treat all weights as one vector; subclasses implement `_minimize`.

    Args:
      loss: scalar tensor to minimise.
      var_list: variables to train; by default all trainable variables.
      equalities: scalar tensors that must be 0.
      inequalities: scalar tensors that must not be negative.
      var_to_bounds: variable -> (low, high), numbers or arrays that broadcast to the variable's shape.
      **optimizer_kwargs: passed to `_minimize`.

    Graph: a placeholder and an assignment for each variable, and the gradients of the loss and the constraints.
    """

    def __init__(self, loss, var_list=None, equalities=None, inequalities=None, var_to_bounds=None, **optimizer_kwargs):
        self._loss = loss
        self._equalities, self._inequalities = list(equalities or ()), list(inequalities or ())
        self._vars = tf.trainable_variables() if var_list is None else list(var_list)
        self._shapes = [var.get_shape().as_list() for var in self._vars]
        self._bounds = None if var_to_bounds is None else self._list_bounds(var_to_bounds)
        self._fed = [tf.placeholder(var.dtype.base_dtype, shape) for var, shape in self._vars_and_shapes()]
        self._updates = [var.assign(value) for var, value in zip(self._vars, self._fed)]
        self.optimizer_kwargs = optimizer_kwargs
        self._weights = _concat_flat(self._vars)
        self._loss_slope = self._concat_gradients(loss)
        self._equality_slopes = [self._concat_gradients(tensor) for tensor in self._equalities]
        self._inequality_slopes = [self._concat_gradients(tensor) for tensor in self._inequalities]

    def minimize(
        self, session=None, feed_dict=None, fetches=None, step_callback=None, loss_callback=None, **run_kwargs
    ):
        """Runs the optimizer until it stops, then assigns the new values to the variables.

        Args:
          session: a session; None for the default session.
          feed_dict: feeds for every run that computes the loss or a constraint.
          fetches: tensors whose values are the arguments of `loss_callback`.
          step_callback: called with the vector of all weights after each step of the optimizer.
          loss_callback: called after each computation of the loss.
          **run_kwargs: arguments for the run that assigns the variables.
        """
        session = session or tf.get_default_session()

        def make_function(*tensors, callback=None):
            return self._make_function(session, tensors, feed_dict or {}, list(fetches or ()), callback)

        values = self._minimize(
            initial_val=session.run(self._weights),
            loss_grad_func=make_function(self._loss, self._loss_slope, callback=loss_callback),
            equality_funcs=[make_function(tensor) for tensor in self._equalities],
            equality_grad_funcs=[make_function(tensor) for tensor in self._equality_slopes],
            inequality_funcs=[make_function(tensor) for tensor in self._inequalities],
            inequality_grad_funcs=[make_function(tensor) for tensor in self._inequality_slopes],
            packed_bounds=self._bounds,
            step_callback=step_callback or (lambda weights: None),
            optimizer_kwargs=self.optimizer_kwargs,
        )
        session.run(self._updates, dict(zip(self._fed, self._split_by_variable(values))), **run_kwargs)

    def _minimize(
        self, initial_val, loss_grad_func, equality_funcs, equality_grad_funcs, inequality_funcs,
        inequality_grad_funcs, packed_bounds, step_callback, optimizer_kwargs,
    ):  # fmt: skip
        """Returns the best vector of weights.

        The search starts from the vector `initial_val`. Each function takes a vector and returns a list of arrays.
        """
        raise NotImplementedError("ExternalOptimizerInterface: a subclass must implement _minimize().")

    def _vars_and_shapes(self):
        return zip(self._vars, self._shapes)

    def _list_bounds(self, var_to_bounds):
        lows, highs = [], []
        for var, shape in self._vars_and_shapes():
            low, high = var_to_bounds.get(var, (-np.inf, np.inf))
            lows.extend(np.broadcast_to(low, shape).flat)
            highs.extend(np.broadcast_to(high, shape).flat)
        return list(zip(lows, highs))

    def _concat_gradients(self, tensor):
        found = zip(tf.gradients(tensor, self._vars), self._vars)
        return _concat_flat([tf.zeros_like(var) if grad is None else grad for grad, var in found])

    def _split_by_variable(self, values):
        ends = np.cumsum([int(np.prod(shape)) for shape in self._shapes])[:-1]
        return [part.reshape(shape) for part, shape in zip(np.split(values, ends), self._shapes)]

    def _make_function(self, session, tensors, feed_dict, fetches, callback):
        """Returns a function that feeds a vector of weights and returns the values of tensors."""

        def compute(weights):
            fed = {**dict(zip(self._vars, self._split_by_variable(weights))), **feed_dict}
            found = session.run([*tensors, *fetches], fed)
            if callback is not None:
                callback(*found[len(tensors) :])
            return found[: len(tensors)]

        return compute


class ScipyOptimizerInterface(ExternalOptimizerInterface):
    """An optimizer that calls `scipy.optimize.minimize`, whose arguments `method` and `options` it accepts."""

    _DEFAULT_METHOD = "L-BFGS-B"

    def _minimize(
        self, initial_val, loss_grad_func, equality_funcs, equality_grad_funcs, inequality_funcs,
        inequality_grad_funcs, packed_bounds, step_callback, optimizer_kwargs,
    ):  # fmt: skip
        constraints = [
            {"type": kind, "fun": _wrap_to_return_float64(function), "jac": _wrap_to_return_float64(gradient)}
            for kind, functions, gradients in (
                ("eq", equality_funcs, equality_grad_funcs),
                ("ineq", inequality_funcs, inequality_grad_funcs),
            )
            for function, gradient in zip(functions, gradients)
        ]
        own = {"jac": True, "callback": step_callback, "constraints": constraints, "bounds": packed_bounds}
        for name in own.keys() & optimizer_kwargs.keys():
            cure = "give var_to_bounds" if name == "bounds" else "leave it out"
            raise ValueError(f"ScipyOptimizerInterface: {name} is set by this class; {cure}.")
        arguments = {"method": self._DEFAULT_METHOD, **own, **optimizer_kwargs}
        found = importlib.import_module("scipy.optimize").minimize(
            _wrap_to_return_float64(loss_grad_func), np.asarray(initial_val, np.float64), **arguments
        )
        told = f"{found.get('nit', '?')} iterations, {found.get('nfev', '?')} evaluations, loss {found.fun:.6g}"
        tf.logging.info("ScipyOptimizerInterface: %s (%s)", told, found.message)
        return found.x


def _wrap_to_return_float64(function):
    """Wraps a function so that it returns float64, because some methods of SciPy do not convert results."""
    return lambda weights: [np.asarray(found, np.float64)[()] for found in function(weights)]


def _concat_flat(tensors):
    """Returns all elements of tensors as one vector."""
    return tf.concat([tf.reshape(tensor, [-1]) for tensor in tensors], 0)
