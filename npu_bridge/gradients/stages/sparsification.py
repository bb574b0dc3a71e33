"""Gradient sparsification: only the largest values are sent, and the others with later steps."""

from __future__ import annotations

import abc
import logging
import math
from typing import Any

import tensorflow as tf

from npu_bridge import collective
from npu_bridge.gradients.arithmetic import in_true_units, map_values, sum_repeated_rows
from npu_bridge.gradients.graph_mode import variable_like
from npu_bridge.gradients.stages.all_reduce import AllReduce
from npu_bridge.gradients.stages.clipping import positive
from npu_bridge.options.errors import message, say_once, shown


class _Sparsified(AllReduce, abc.ABC):
    """Sends some values of each dense gradient with their positions, and adds up what all ranks sent.

    With error feedback a rank keeps what it did not send, in true units, and adds it to the next gradient. A
    skipped step leaves what is kept bit for bit. Sparse gradients are sent as ever. One rank sends nothing and keeps
    nothing.
    """

    needs = ("a verdict",)

    def __init__(self, error_feedback: bool):
        super().__init__(type(self).__name__)
        if not isinstance(error_feedback, bool):
            owner, mend = type(self).__name__, "Leave it out for True."
            raise TypeError(
                message(owner, "error_feedback is no boolean", "True or False", shown(error_feedback), mend)
            )
        self._has_feedback = self.needs_variables = error_feedback
        self._residuals: tf.Module | None = None
        self._residual_of: dict = {}

    def __copy__(self):
        return type(self).from_config(self.get_config())

    def named(self, name: str) -> None:
        """Sets the prefix of the transfers' names."""
        self._name = name

    def state(self):
        if not self._has_feedback:
            return {}
        if self._residuals is None:
            self._residuals = tf.Module(name="not_sent")
        return {"not_sent": self._residuals}

    def make_variables(self, variables):
        for variable in variables if self._has_feedback and self._is_used() else []:
            self._residual(variable)

    def variables_of_this_rank(self):
        return list(self._residual_of.values())

    def describe(self, step, plan):
        super().describe(step, plan)
        plan.settings[type(self).__name__] = str(self.get_config())

    def prepare(self, step):
        if self._is_used() and self._has_feedback:
            for grad, variable in step.grads_and_vars:
                if isinstance(grad, tf.Tensor):
                    self._residual(variable)

    def reduce(self, step):
        if not self._is_used():
            super().reduce(step)
            return
        ranks = collective.current()
        with tf.name_scope(f"{self._name}_Sparsified"):
            step.grads_and_vars = [
                (None if sent is None else self._mean(sent, variable, position, step, ranks), variable)
                for position, (sent, (_, variable)) in enumerate(zip(step.on_wire, step.grads_and_vars))
            ]
        step.divisor = None

    def after(self, step):
        if not step.carried:
            return None
        with tf.name_scope(f"{self._name}_Sparsified"):
            assigned = [
                residual.assign(tf.where(step.should_apply, step.carried[key], residual.read_value()))
                for key, residual in self._residual_of.items()
                if key in step.carried
            ]
        return None if tf.executing_eagerly() else tf.group(*assigned)

    def _mean(self, sent, variable, position, step, ranks):
        """The mean over the ranks in true units, in the dtype of the gradient."""
        wide = map_values(sent, lambda values: tf.cast(values, tf.float32))
        grad = in_true_units(wide, step.divisor)
        name = f"{self._name}_sparse_{position}"
        if isinstance(grad, tf.IndexedSlices):
            values = ranks.all_gather(grad.values / ranks.size, f"{name}_values")
            indices = ranks.all_gather(grad.indices, f"{name}_indices")
            mean = sum_repeated_rows(tf.IndexedSlices(values, indices, grad.dense_shape))
            return map_values(mean, lambda values: tf.cast(values, sent.dtype))
        if self._has_feedback:
            grad = grad + self._residual(variable).read_value()
        flat = tf.reshape(grad, [-1])
        positions = self._select(flat)
        chosen = tf.gather(flat, positions)
        if self._has_feedback:
            left = tf.tensor_scatter_nd_update(flat, positions[:, tf.newaxis], tf.zeros_like(chosen))
            step.carried[variable.ref()] = tf.reshape(left, variable.shape)
        values = ranks.all_gather(chosen, f"{name}_values")
        all_positions = ranks.all_gather(positions, f"{name}_positions")
        total = tf.math.unsorted_segment_sum(values, all_positions, tf.size(flat))
        return tf.cast(tf.reshape(total / ranks.size, tf.shape(grad)), sent.dtype)

    def _residual(self, variable: Any) -> Any:
        key = variable.ref()
        if key not in self._residual_of:
            made = variable_like(variable, type(self).__name__, "not_sent", tf.float32)
            setattr(self.state()["not_sent"], f"residual_{len(self._residual_of)}", made)
            self._residual_of[key] = made
        return self._residual_of[key]

    def _is_used(self) -> bool:
        """False where dense transfers send fewer bytes, or one rank sends nothing."""
        return collective.current().size > 1

    @abc.abstractmethod
    def _select(self, flat: tf.Tensor) -> tf.Tensor:
        """Positions in a vector of the values to send, int32."""


@tf.keras.utils.register_keras_serializable(package="npu_bridge")
class TopK(_Sparsified):
    """Sends the share `density` of each gradient whose magnitudes are largest, in place of the all-reduce.

    Each of the N ranks receives the values and positions of all others, so it pays below a density of 1 / (N - 1); from
    there on gradients are all-reduced as without this stage, which is logged once.

    Args:
      density: share of the values that is sent, above 0 and at most 1; at least one value of each gradient is.
      error_feedback: add what was not sent to the gradient of the next step, instead of losing it.
    Raises:
      TypeError: `density` is not a number, or `error_feedback` no boolean.
      ValueError: `density` is out of its range.
    Graph: with error feedback, a variable of each trained variable's shape, which is each rank's own.
    """

    def __init__(self, density: float, error_feedback: bool = True):
        super().__init__(error_feedback)
        self._density = positive("TopK", "density", density)
        if self._density > 1:
            mend = "Use 0.01 to send one value of a hundred."
            raise ValueError(message("TopK", "density is out of range", "0 < density <= 1", shown(density), mend))

    def get_config(self):
        return {"density": self._density, "error_feedback": self._has_feedback}

    def sent_bytes(self, others, ranks):
        if self._is_dense(ranks):
            return others
        of_dense = 2 * (ranks - 1) / ranks * tf.float32.size  # a ring all-reduce
        of_sparse = (ranks - 1) * self._density * (tf.float32.size + tf.int32.size)  # a message to each other rank
        return others * of_sparse / of_dense

    def _is_dense(self, ranks):
        return self._density * (ranks - 1) >= 1

    def _is_used(self):
        ranks = collective.current().size
        is_dense = ranks > 1 and self._is_dense(ranks)
        if is_dense:
            limit = f"1 / {ranks - 1}"
            say_once(
                logging.INFO, f"TopK: density={self._density} is not below {limit}; gradients are sent as a whole."
            )
        return ranks > 1 and not is_dense

    def _select(self, flat):
        count = math.ceil(self._density * flat.shape.num_elements())
        return tf.math.top_k(tf.abs(flat), k=count, sorted=False).indices


@tf.keras.utils.register_keras_serializable(package="npu_bridge")
class Threshold(_Sparsified):
    """Sends the values of each gradient whose magnitude, in true units, is at least `value`, not all of them.

    Args:
      value: the smallest magnitude that is sent, above 0.
      error_feedback: as in `TopK`.
    Raises:
      TypeError: `value` is not a number, or `error_feedback` no boolean.
      ValueError: `value` is out of its range.
    Graph: as `TopK`.
    """

    def __init__(self, value: float, error_feedback: bool = True):
        super().__init__(error_feedback)
        self._value = positive("Threshold", "value", value)

    def get_config(self):
        return {"value": self._value, "error_feedback": self._has_feedback}

    def sent_bytes(self, others, ranks):
        return None

    def _select(self, flat):
        return tf.cast(tf.where(tf.abs(flat) >= self._value)[:, 0], tf.int32)
