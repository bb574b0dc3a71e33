"""Keeps the sums of a window's gradients in variables: adds the term of each batch, and resets them at its end."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any, Callable

from npu_bridge.base.errors import message, say_once
from npu_bridge.base.own_tensorflow import tf
from npu_bridge.gradients.arithmetic import gradient_values, has_finite_norm, map_gradients, map_values
from npu_bridge.gradients.graph_mode import group_in_graph, make_tensors_if, run_if, state_variable, variable_like
from npu_bridge.gradients.step import Step
from npu_bridge.gradients.steps.trained_apart import CountersByVariables


class GradientSums:
    """The variables in which one optimizer accumulates gradients.

    Args:
      owner: name of the stage, for messages.
    Attributes:
      module: a `tf.Module` with all the variables, for checkpoints.
      counters: numbers of batches in the windows so far, int32 scalars, by the variables that are trained together.
    """

    def __init__(self, owner: str):
        self._owner = owner
        self._kept: dict = {}
        self.module = tf.Module(name="accumulated")
        self.counters = CountersByVariables("accumulated_steps", tf.int32, joins_lists=True)
        self.module.counter, self.module.counters_apart = self.counters.state().values()

    def warn_about_mixed_lists(self) -> None:
        """Warns once if batches of one window had gradients of different variables."""
        if self.counters.are_lists_mixed:
            problem = "some steps have gradients of other variables than the steps before"
            expected = "the same variables in each batch, since a window updates the variables of its last batch"
            fix = "Compute one gradient of the sum of all losses, or make an optimizer for each loss."
            say_once(logging.WARNING, message(self._owner, problem, expected, "lists with common variables", fix))

    def sum_of(self, variable: Any, may_be_sparse: bool) -> _SumVariable:
        """Returns the sum of a trained variable's gradients; creates the sum at the first call."""
        kept = self._kept.get(variable.ref())
        if kept is None:
            kept = self._kept[variable.ref()] = _SumVariable(variable, self._owner)
            setattr(self.module, f"sum_{len(self._kept) - 1}", kept)  # where object-based checkpoints find it
        if may_be_sparse:
            kept.make_sparse()
        return kept


class AccumulationWindow:
    """The batches since the last update, including the current batch.

    Args:
      sums: the variables that hold the sums of the earlier batches.
      batches: number of batches in a window.
      grads_and_vars: (gradient, variable) pairs of the current batch.
      addend: function of a gradient, the dtype of the sum and the number of earlier batches in the window; returns the
        value to add to the sum.
    Attributes:
      is_last: boolean scalar, whether the current batch is the last batch of its window.
    """

    def __init__(
        self, sums: GradientSums, batches: int, grads_and_vars: Sequence, addend: Callable[[Any, tf.DType, Any], Any]
    ):
        self._counter = sums.counters.counter_of([variable for grad, variable in grads_and_vars if grad is not None])
        self._counted = self._counter.read_value()
        self.is_last = self._counted >= batches - 1  # above in a window that began when `batches` was larger
        kept = [
            None if grad is None else sums.sum_of(variable, may_be_sparse=isinstance(grad, tf.IndexedSlices))
            for grad, variable in grads_and_vars
        ]
        self._sums = map_gradients(
            lambda position, grad: kept[position].add_gradient(addend(grad, kept[position].sum.dtype, self._counted)),
            [grad for grad, _ in grads_and_vars],
        )

    def window_sums(self, step: Step) -> list:
        """Returns (sum, variable) pairs of the window so far, with the dtype and loss scale of the gradients."""

        def in_gradient_units(position, grad):
            total = self._sums[position].total()
            if step.divisor is not None:  # multiplied again, to be all-reduced
                total = map_values(total, lambda values: values * tf.cast(step.divisor, values.dtype))
            return map_values(total, lambda values: tf.cast(values, gradient_values(grad).dtype))

        sums = map_gradients(in_gradient_units, [grad for grad, _ in step.grads_and_vars])
        return [(total, variable) for total, (_, variable) in zip(sums, step.grads_and_vars)]

    def are_sums_finite(self) -> tf.Tensor:
        """Returns whether the sums of this window are finite, a boolean scalar; they are stored without loss scale."""
        return has_finite_norm([each.total() for each in self._sums if each is not None])

    def store_or_reset(self) -> Any:
        """Stores the sums for the next batch, or resets them to 0 after the last batch; returns the op."""
        counted = self._counter.assign(tf.where(self.is_last, 0, self._counted + 1))
        # One condition for all dense sums, and two for all sparse ones: a condition for each takes long to build.
        dense = [each for each in self._sums if isinstance(each, _DenseSum)]
        sparse = [each for each in self._sums if isinstance(each, _SparseSum)]
        values = (
            make_tensors_if(
                self.is_last,
                lambda: [tf.zeros_like(each.total()) for each in dense],
                lambda: [tf.identity(each.total()) for each in dense],
            )
            if dense
            else []
        )
        kept = [each.store(value) for each, value in zip(dense, values)]
        if sparse:
            added = run_if(tf.logical_not(self.is_last), lambda: group_in_graph(*[each.add_batch() for each in sparse]))
            cleared = run_if(self.is_last, lambda: group_in_graph(*[each.clear() for each in sparse]))
            kept += [added, cleared]
        return group_in_graph(counted, *kept)


class _SumVariable(tf.Module):
    """The variable that holds the sum of one trained variable's gradients.

    Attributes:
      sum: the sum of the gradients of this window, without the loss scale.
      touched: for each row, whether a sparse gradient of this window contained it; None if all gradients were dense.
    """

    def __init__(self, variable, owner):
        super().__init__(name="sum")
        self._owner = owner
        self._name = variable.name.partition(":")[0]
        own = tf.as_dtype(variable.dtype).base_dtype
        dtype = tf.float32 if own.size < tf.float32.size else own
        self.sum = variable_like(variable, owner, "accumulated", dtype)
        self.touched = None
        self._is_sparse: bool | None = None

    def make_sparse(self):
        if self.touched is None:
            name = f"accumulated/{self._name}_rows"
            self.touched = state_variable(lambda: tf.zeros(self.sum.shape[:1], tf.bool), name)

    def add_gradient(self, addend):
        """Adds a gradient; returns the new sum, which the window stores in the variable.

        Raises:
          ValueError: one of this gradient and the earlier ones is sparse, and the other dense.
        """
        is_sparse = isinstance(addend, tf.IndexedSlices)
        if self._is_sparse not in (None, is_sparse):
            kinds = ("a dense gradient", "a sparse gradient (tf.IndexedSlices)")
            problem = f"the gradients of {self._name} are dense in some batches and sparse in others"
            fix = "Convert the sparse ones with tf.convert_to_tensor before apply_gradients."
            raise ValueError(message(self._owner, problem, kinds[not is_sparse], kinds[is_sparse], fix))
        self._is_sparse = is_sparse
        return (_SparseSum if isinstance(addend, tf.IndexedSlices) else _DenseSum)(self, addend)


class _DenseSum:
    """A sum plus the dense gradient of one more batch."""

    def __init__(self, kept, addend):
        self._kept = kept
        self._total = kept.sum.read_value() + addend

    def total(self):
        return self._total

    def store(self, value):
        return self._kept.sum.assign(value)


class _SparseSum:
    """A sum plus the sparse gradient of one more batch."""

    def __init__(self, kept, addend):
        self._kept = kept
        self._addend = addend

    def total(self):
        """Returns the sum as sparse rows: all rows of the gradients of this window, each once, in ascending order."""
        indices = tf.cast(self._addend.indices, tf.int64)
        rows = tf.where(self._mark_rows_of_addend(self._kept.touched.read_value()))[:, 0]
        positions = tf.searchsorted(rows, indices)[:, tf.newaxis]
        values = tf.tensor_scatter_nd_add(tf.gather(self._kept.sum, rows), positions, self._addend.values)
        shape = self._kept.sum.shape.as_list()
        return tf.IndexedSlices(values, tf.cast(rows, self._addend.indices.dtype), tf.constant(shape))

    def _mark_rows_of_addend(self, touched):
        indices = self._addend.indices[:, tf.newaxis]
        return tf.tensor_scatter_nd_update(touched, indices, tf.ones_like(self._addend.indices, tf.bool))

    def add_batch(self):
        kept = self._kept
        touched = kept.touched.assign(self._mark_rows_of_addend(kept.touched.read_value()))
        added = kept.sum.scatter_add(self._addend)
        return group_in_graph(touched, added)

    def clear(self):
        kept = self._kept
        rows = tf.where(kept.touched.read_value())[:, 0]
        zeros = tf.zeros([tf.size(rows), *kept.sum.shape.as_list()[1:]], kept.sum.dtype)
        cleared = kept.sum.scatter_update(tf.IndexedSlices(zeros, rows))
        with tf.control_dependencies([rows]):
            forgotten = kept.touched.assign(tf.zeros_like(kept.touched))
        return group_in_graph(cleared, forgotten)
