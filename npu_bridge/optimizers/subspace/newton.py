"""Implements `SubspaceNewton`: quasi-Newton steps along the directions of a basis, momentum along all others."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from typing import Any

from npu_bridge import collective
from npu_bridge.base.arguments import check_count, check_instance, check_number
from npu_bridge.base.errors import message
from npu_bridge.base.own_tensorflow import tf
from npu_bridge.graph.control_flow import classic_control_flow
from npu_bridge.graph.copies import make_copier
from npu_bridge.optimizers.subspace.basis import Basis, row_range_of_part
from npu_bridge.optimizers.unfused import as_dense

tf1 = tf.compat.v1
_COMPLEMENT = "complement"
# Below this product of a step and the change of the gradient, no curvature is learnt from them.
_LEAST_CURVATURE = 1e-20


class SubspaceNewton(tf.compat.v1.train.Optimizer):
    """Makes BFGS steps along the directions of a basis, and momentum steps along all other directions.

    With P the basis, g the gradient, f the loss on this batch and w the weights:

        c = P g;  B learns from the change of c since the last step (BFGS on the inverse Hessian)
        d = -B c;  r = the first of 1, rho, rho^2... with f(w + r P'd) < f(w) + sigma r c.d, else 0
        m = gamma m + (g - P'P g);  w = w + r P'd - alpha m

    If no rate r is accepted, B and c stay as before the step. Every trial of a rate evaluates the loss again, on the
    same batch. For this, a loss function is called again; of a loss in a TF 1 graph, the part that depends on the
    variables is copied. The loss must have only one value for a batch, unlike a loss with dropout.

    With several ranks, wrap this optimizer in `NPUDistributedOptimizer` or `NPUOptimizer`, which average the gradients.
    Each rank holds a part of the rows of the basis. Losses are averaged, so all ranks accept the same rate. Under loss
    scaling, losses and gradients are unscaled.

    Args:
      basis: a `Basis` of the trained variables, such as the result of `compute_pca_basis`.
      rho: the factor by which each further trial is shorter, in (0, 1).
      gamma: momentum, in [0, 1).
      alpha: learning rate for the directions outside of the basis, at least 0.
      sigma: the smallest accepted decrease of the loss, as a fraction of the expected decrease, in (0, 1).
      trials: maximum number of rates that are tried. With 2, a step evaluates the loss once or twice.
      name: name of the optimizer, and prefix of the names of its collectives.
    Raises:
      TypeError: `basis` is not a Basis, or an argument is not a number.
      ValueError: a number is out of range. When gradients are applied: the variables are not those of the basis.
    Graph: a slot `complement` for each variable, and for k directions a (k, k) matrix and two vectors. This rank's rows
      of the basis are a local variable, which is not in checkpoints.
    Ranks: applying gradients is collective.
    """

    needs_all_gradients = True  # at once, so ranks cannot share the work of an update

    def __init__(
        self,
        basis: Basis,
        rho: float = 0.55,
        gamma: float = 0.9,
        alpha: float = 0.001,
        sigma: float = 0.4,
        trials: int = 2,
        name: str = "SubspaceNewton",
    ):
        super().__init__(use_locking=False, name=name)
        owner, fix = "SubspaceNewton", "Write compute_pca_basis(checkpoints, k), or Basis.load(path)."
        self._basis = check_instance(owner, "basis", basis, Basis, "a Basis", fix)
        fix = "Leave it out for the default."
        self._rho = check_number(owner, "rho", rho, fix, above=0, below=1)
        self._gamma = check_number(owner, "gamma", gamma, fix, at_least=0, below=1)
        self._alpha = check_number(owner, "alpha", alpha, fix, at_least=0)
        self._sigma = check_number(owner, "sigma", sigma, fix, above=0, below=1)
        self._trials = check_count(owner, "trials", trials, fix)
        self._kept: Callable[[], Sequence[Any]] = tuple
        self._rows: dict[Any, Any] = {}
        self._loss: Any = None
        self._value: Any = None

    def compute_gradients(self, loss, *arguments, **keywords):
        """Computes gradients as `tf.compat.v1.train.Optimizer` does, and records the loss for the line search."""
        if not callable(loss):
            grads_and_vars = super().compute_gradients(loss, *arguments, **keywords)
            self.set_unscaled_loss(loss, loss)
            return grads_and_vars
        values = []

        def record_loss():
            values.append(loss())
            return values[-1]

        grads_and_vars = super().compute_gradients(record_loss, *arguments, **keywords)
        self.set_unscaled_loss(loss, values[0])
        return grads_and_vars

    def set_unscaled_loss(self, loss: Any, loss_value: tf.Tensor) -> None:
        """Sets the loss that the line search evaluates. A wrapper that scales the loss passes the unscaled loss here.

        Args:
          loss: the unscaled loss, a tensor of a TF 1 graph or a function that returns the loss.
          loss_value: the value of the loss for this batch.
        """
        self._loss, self._value = loss, loss_value

    def set_variables_to_restore(self, variables: Callable[[], Sequence[Any]]) -> None:
        """Sets which variables, such as moving statistics, get their old values back after each trial step.

        Args:
          variables: a function that returns these variables, which each evaluation of the loss changes.
        """
        self._kept = variables

    def apply_gradients(self, grads_and_vars, global_step=None, name=None):
        """Makes a step with gradients of the last loss given to `compute_gradients`.

        Args:
          grads_and_vars: pairs for all variables of the basis; a variable whose gradient is None is moved only by the
            line search.
          global_step: variable to increase by 1 after the step.
          name: name of the op.
        Returns:
          The op that makes the step; None when executed eagerly.
        Raises:
          ValueError: there is no gradient, the variables are not those of the basis, or the loss cannot be evaluated
            again.
        """
        pairs = list(grads_and_vars)
        if self._loss is None or all(grad is None for grad, _ in pairs):
            problem, expected = "there is nothing to minimize", "gradients from compute_gradients"
            got = "no gradient" if self._loss is not None else "gradients from other code"
            raise ValueError(message("SubspaceNewton", problem, expected, got, "Call compute_gradients or minimize."))
        variables = [variable for _, variable in pairs]
        with tf.init_scope():
            self._create_slots(variables)
        is_graph = not tf.executing_eagerly() and not tf1.get_default_graph().building_function
        with tf.name_scope(name or self.get_name()), classic_control_flow() if is_graph else contextlib.nullcontext():
            gradient = tf.concat(
                [
                    tf.zeros([variable.shape.num_elements()])
                    if grad is None
                    else tf.reshape(tf.cast(as_dense(grad, variable), tf.float32), [-1])
                    for grad, variable in pairs
                ],
                axis=0,
            )
            done = self._take_newton_step(gradient, variables, is_graph)
            if global_step is not None:
                with tf.control_dependencies(done):
                    done = [*done, tf1.assign_add(global_step, 1)]
            return None if tf.executing_eagerly() else tf.group(*done)

    def _take_newton_step(self, gradient, variables, is_graph):
        state = self._find_state_variables()
        learnt, before, last, is_started = [tf.identity(state[key].read_value()) for key in state if key != "rate"]
        coordinates, rows, (first, end) = self._project_gradient(gradient, variables)
        curvature = tf.tensordot(coordinates - before, last, 1)
        hessian = tf.cond(
            tf.logical_and(is_started, curvature > _LEAST_CURVATURE),
            lambda: next_inverse_hessian(learnt, coordinates - before, last),
            lambda: learnt,
        )
        coordinate_step = -tf.linalg.matvec(hessian, coordinates)
        halves = tf.matmul(tf.stack([coordinate_step[first:end], coordinates[first:end]]), rows)
        direction, inside = tf.unstack(self._sum_over_ranks(halves, "direction"))
        with tf.control_dependencies([direction]):
            start = [_copy_value(variable) for variable in variables]
        rate = self._search_accepted_rate(
            direction, tf.tensordot(coordinates, coordinate_step, 1), variables, start, is_graph
        )
        complement = [self.get_slot(variable, _COMPLEMENT) for variable in variables]
        with tf.control_dependencies([rate]):
            rest = _split_into_shapes(gradient - inside, variables)
            momentum = [self._gamma * slot.read_value() + part for slot, part in zip(complement, rest)]
            moved = [
                value + tf.cast(rate * part - self._alpha * kept, value.dtype)
                for value, part, kept in zip(start, _split_into_shapes(direction, variables), momentum)
            ]
            is_accepted = rate > 0
            kept_or_new = {
                "inverse_hessian": tf.where(is_accepted, hessian, learnt),
                "coordinates": tf.where(is_accepted, coordinates, before),
                "last_step": tf.where(is_accepted, rate * coordinate_step, last),
                "is_started": tf.logical_or(is_accepted, is_started),
                "rate": rate,
            }
            assigned = [variable.assign(value) for variable, value in zip(variables, moved)]
            assigned += [slot.assign(value) for slot, value in zip(complement, momentum)]
            return assigned + [state[key].assign(value) for key, value in kept_or_new.items()]

    def _project_gradient(self, gradient, variables):
        """Returns the product P g of basis and gradient, this rank's rows of P, and the range of these rows."""
        ranks = collective.current()
        first, end = row_range_of_part(len(self._basis.rows), ranks.rank, ranks.size)
        rows = self._read_basis_rows_of_rank(variables)
        own = tf.linalg.matvec(rows, gradient)
        whole = own if ranks.size == 1 else ranks.all_gather(own, f"{self._name}_project_gradient")
        return tf.ensure_shape(whole, [len(self._basis.rows)]), rows, (first, end)

    def _sum_over_ranks(self, tensor, label):
        ranks = collective.current()
        return tensor if ranks.size == 1 else ranks.all_reduce([tensor], f"{self._name}_{label}", average=False)[0]

    def _average_over_ranks(self, loss, label):
        ranks = collective.current()
        loss = tf.cast(tf.reduce_mean(loss), tf.float32)
        return loss if ranks.size == 1 else ranks.all_reduce([loss], f"{self._name}_{label}")[0]

    def _search_accepted_rate(self, direction, slope, variables, start, is_graph):
        """Returns the accepted rate, or 0.0 if no rate is accepted; the last trial's values stay in `variables`."""
        loss_before = self._average_over_ranks(self._value, "loss")
        evaluate = make_copier(self._loss, variables, "SubspaceNewton") if not callable(self._loss) else self._loss
        steps = _split_into_shapes(direction, variables)
        kept = list(self._kept())

        def try_rate(number, accepted):
            rate = tf.pow(self._rho, tf.cast(number, tf.float32))
            saved = [_copy_value(variable) for variable in kept]
            with tf.control_dependencies([rate, *saved]):
                moved = [
                    variable.assign(value + tf.cast(rate * step, value.dtype))
                    for variable, value, step in zip(variables, start, steps)
                ]
            with tf.control_dependencies(_keep_ops_if_graph(moved)):
                loss = tf.identity(evaluate())
            with tf.control_dependencies([loss]):
                restored = [variable.assign(value) for variable, value in zip(kept, saved)]
            with tf.control_dependencies(_keep_ops_if_graph(restored)):
                loss = self._average_over_ranks(loss, "trial")
            is_accepted = loss < loss_before + self._sigma * rate * slope
            return number + 1, tf.where(is_accepted, rate, tf.zeros_like(rate))

        return tf.while_loop(
            lambda number, accepted: tf.logical_and(tf.equal(accepted, 0.0), number < self._trials),
            try_rate,
            [tf.constant(0), tf.constant(0.0)],
            parallel_iterations=1,
        )[1]

    def _create_slots(self, var_list):
        k = len(self._basis.rows)
        for variable in var_list:
            zeros = tf.zeros_initializer()
            where = f"{self._name}/{_COMPLEMENT}"
            self._get_or_make_slot_with_initializer(variable, zeros, variable.shape, tf.float32, _COMPLEMENT, where)
        first = min(var_list, key=lambda variable: variable.name)
        for key, value in (
            ("inverse_hessian", tf.eye(k)),
            ("coordinates", tf.zeros([k])),
            ("last_step", tf.zeros([k])),
            ("is_started", tf.constant(False)),
            ("rate", tf.constant(0.0)),
        ):
            self._create_non_slot_variable(value, f"{self._name}/{key}", first)

    def _read_basis_rows_of_rank(self, variables):
        """Returns this rank's rows of the basis, with columns in the order of the variables."""
        with tf.init_scope():
            place = None if tf.executing_eagerly() else tf1.get_default_graph()
            if place not in self._rows:
                ranks = collective.current()
                rows = self._basis.part(variables, ranks.rank, ranks.size)
                self._rows[place] = _make_array_reader(rows, f"{self._name}/basis")
        return self._rows[place]()

    def _find_state_variables(self):
        """Returns the state kept from step to step, by name; the last entry is the last accepted rate."""
        with tf.init_scope():
            graph = None if tf.executing_eagerly() else tf1.get_default_graph()
        keys = ("inverse_hessian", "coordinates", "last_step", "is_started", "rate")
        return {key: self._get_non_slot_variable(f"{self._name}/{key}", graph=graph) for key in keys}

    @property
    def rate(self) -> Any:
        """The variable that holds the rate of the last step, which is 0.0 if no rate was accepted."""
        return self._find_state_variables()["rate"]


def next_inverse_hessian(inverse: tf.Tensor, change: tf.Tensor, step: tf.Tensor) -> tf.Tensor:
    """Returns the BFGS update of an inverse Hessian B: T'B T + s s'/q, where q = y.s and T = I - y s'/q.

    Args:
      inverse: B, a (k, k) matrix.
      change: y, the change of the gradient, a vector of k values.
      step: s, the change of the point; y.s must not be 0.
    """
    product = tf.tensordot(change, step, 1)
    turned = tf.eye(inverse.shape.as_list()[0], dtype=inverse.dtype) - tf.tensordot(change, step, 0) / product
    return tf.matmul(turned, tf.matmul(inverse, turned), transpose_a=True) + tf.tensordot(step, step, 0) / product


def _copy_value(variable):
    """Copies a variable's current value; the buffer of a TF 1 reference variable would show later values."""
    value = tf.convert_to_tensor(variable)
    return tf.identity(value) if tf.executing_eagerly() else tf.raw_ops.DeepCopy(x=value)


def _keep_ops_if_graph(ops):
    return [] if tf.executing_eagerly() else ops


def _split_into_shapes(flat, variables):
    parts = tf.split(flat, [variable.shape.num_elements() for variable in variables])
    return [tf.reshape(part, variable.shape) for part, variable in zip(parts, variables)]


def _make_array_reader(array, name):
    """Returns a function that reads an array as a tensor, from a variable that is not in checkpoints."""
    if tf.executing_eagerly():
        return tf.Variable(array, trainable=False, name=name).read_value
    # A constant would be part of the TF 1 graph, which is limited to 2 GB.
    start = tf.ensure_shape(tf.numpy_function(lambda: array, [], tf.float32), array.shape)
    kept = tf1.Variable(
        start, trainable=False, collections=[tf1.GraphKeys.LOCAL_VARIABLES], use_resource=True, name=name
    )

    def read():
        # A script can leave out the initialiser of local variables.
        return tf.cond(tf1.is_variable_initialized(kept), kept.read_value, lambda: tf.identity(start))

    return read
