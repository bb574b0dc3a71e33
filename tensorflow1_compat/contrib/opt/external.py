"""Losses minimised outside of TensorFlow: by SciPy's optimizers."""

from __future__ import annotations

import numpy as np
import tensorflow.compat.v1 as tf


class ExternalOptimizerInterface:
    """A loss, its gradient and its constraints as functions of one flat vector, for a minimiser to call.

    Args:
      loss: scalar tensor.
      var_list: variables to move (default: all trainable ones).
      equalities, inequalities: lists of tensors that have to be 0, or at least 0.
      var_to_bounds: variable -> (lower, upper), numbers or arrays of its shape.
      **optimizer_kwargs: for the minimiser.
    """

    def __init__(self, loss, var_list=None, equalities=None, inequalities=None, var_to_bounds=None, **optimizer_kwargs):
        self._loss, self._vars = loss, list(var_list or tf.trainable_variables())
        self._equalities, self._inequalities = list(equalities or []), list(inequalities or [])
        self.optimizer_kwargs = optimizer_kwargs
        sizes = [int(np.prod(var.shape.as_list())) for var in self._vars]
        ends = np.cumsum([0, *sizes])
        self._places = [slice(start, end) for start, end in zip(ends[:-1], ends[1:])]
        self._loss_grad = self._gradient(loss)
        self._equality_grads = [self._gradient(each) for each in self._equalities]
        self._inequality_grads = [self._gradient(each) for each in self._inequalities]
        self._new_values = [tf.placeholder(var.dtype.base_dtype, var.shape) for var in self._vars]
        self._assign = tf.group(*(tf.assign(var, value) for var, value in zip(self._vars, self._new_values)))
        self._packed_bounds = None if var_to_bounds is None else self._bounds(var_to_bounds)

    def _gradient(self, tensor):
        gradients = tf.gradients(tensor, self._vars)
        parts = [
            tf.zeros_like(var) if grad is None else tf.convert_to_tensor(grad)
            for var, grad in zip(self._vars, gradients)
        ]
        return tf.concat([tf.reshape(part, [-1]) for part in parts], 0)

    def _bounds(self, var_to_bounds):
        by_name = {var.name: bounds for var, bounds in var_to_bounds.items()}
        packed = []
        for var in self._vars:
            low, high = by_name.get(var.name, (-np.inf, np.inf))
            shape = var.shape.as_list()
            packed.extend(zip(np.broadcast_to(low, shape).ravel(), np.broadcast_to(high, shape).ravel()))
        return packed

    def minimize(
        self, session=None, feed_dict=None, fetches=None, step_callback=None, loss_callback=None, **run_kwargs
    ):
        """Moves the variables to where the loss is least.

        Args:
          session: default: the default session.
          feed_dict: for every run.
          fetches: tensors whose values `loss_callback` gets with each evaluation of the loss.
          step_callback: called with the flat vector after each step.
          loss_callback: called with the values of `fetches`.
        """
        session = session or tf.get_default_session()
        fetches = list(fetches or [])

        def place(vector):
            values = [vector[each].reshape(var.shape.as_list()) for each, var in zip(self._places, self._vars)]
            session.run(self._assign, dict(zip(self._new_values, values)))

        def run(*tensors):
            def at(vector):
                place(vector)
                values = session.run([*tensors, *fetches], feed_dict, **run_kwargs)
                if loss_callback is not None and tensors[0] is self._loss:
                    loss_callback(*values[len(tensors) :])
                values = [np.asarray(value, np.float64) for value in values[: len(tensors)]]
                return values if len(values) > 1 else values[0]

            return at

        start = np.concatenate([np.ravel(value) for value in session.run(self._vars)]).astype(np.float64)
        found = self._minimize(
            initial_val=start, loss_grad_func=run(self._loss, self._loss_grad),
            equality_funcs=[run(each) for each in self._equalities],
            equality_grad_funcs=[run(each) for each in self._equality_grads],
            inequality_funcs=[run(each) for each in self._inequalities],
            inequality_grad_funcs=[run(each) for each in self._inequality_grads],
            packed_bounds=self._packed_bounds, step_callback=step_callback, optimizer_kwargs=self.optimizer_kwargs,
        )  # fmt: skip
        place(np.asarray(found))

    def _minimize(self, **kwargs):
        raise NotImplementedError("ExternalOptimizerInterface: a subclass says how to minimise, in _minimize().")


class ScipyOptimizerInterface(ExternalOptimizerInterface):
    """`scipy.optimize.minimize` over variables; `method` and `options` are its arguments (default: L-BFGS-B)."""

    _DEFAULT_METHOD = "L-BFGS-B"

    def _minimize(
        self, initial_val, loss_grad_func, equality_funcs, equality_grad_funcs, inequality_funcs,
        inequality_grad_funcs, packed_bounds, step_callback, optimizer_kwargs,
    ):  # fmt: skip
        from scipy import optimize

        def value_and_gradient(vector):
            loss, gradient = loss_grad_func(vector)
            return float(loss), gradient

        constraints = [
            {"type": kind, "fun": function, "jac": gradient}
            for kind, functions, gradients in (
                ("eq", equality_funcs, equality_grad_funcs),
                ("ineq", inequality_funcs, inequality_grad_funcs),
            )
            for function, gradient in zip(functions, gradients)
        ]
        arguments = dict(optimizer_kwargs)
        method = arguments.pop("method", "SLSQP" if constraints else self._DEFAULT_METHOD)
        if constraints:
            arguments["constraints"] = constraints
        result = optimize.minimize(
            value_and_gradient, initial_val, jac=True, method=method, bounds=packed_bounds, callback=step_callback,
            **arguments,
        )  # fmt: skip
        tf.logging.info("ScipyOptimizerInterface: %s after %s evaluations, loss %s", result.message, result.nfev,
                        result.fun)  # fmt: skip
        return result.x
