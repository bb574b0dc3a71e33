"""Gradient accumulation: the gradients of several batches are added up and applied once."""

from __future__ import annotations

from typing import Any, NamedTuple

import tensorflow as tf

from npu_bridge.base.arguments import check_choice, check_count
from npu_bridge.base.errors import message
from npu_bridge.gradients.arithmetic import in_true_units, map_values, nothing_like, parts_of, rebuilt, values_of
from npu_bridge.gradients.graph_mode import run_if, state_variable, tensors_if, variable_like
from npu_bridge.gradients.several_scales import judge
from npu_bridge.gradients.stage import Stage, gradients_from_elsewhere
from npu_bridge.gradients.stages.all_reduce import readiness_of


@tf.keras.utils.register_keras_serializable(package="npu_bridge")
class Accumulate(Stage):
    """Adds up the gradients of `steps` batches on each rank; only the last batch of such a window updates.

    In a window there are one all-reduce, one decision about overflows, one update, one count of
    `global_step` (or `iterations`, which schedules read) and one move of the loss scale. If the gradients of one batch
    are not usable, the whole window is left out and the next one begins with zeros. With "mean" and a loss that is a
    mean over the batch, `steps` batches train as one batch of their sum would.

    Between the last batches `compute_gradients` gives zeros, and sparse gradients without rows. The gradients of the
    window come with its last batch: clip these. Sums are kept in true units, so that the loss scale may move in
    between, in float32 (float64 for float64 gradients). A sparse gradient stays sparse: the update gets the rows that
    any batch of the window has touched.

    Two of these once-a-window things can happen with every batch instead. With `exchange="batch"` every batch is
    all-reduced and judged by itself; one that overflows is left out, and the window lasts until `steps` others have
    come. With `loss_scale="batch"` the loss scale moves with every batch, so that each one has its own; all else is
    that of a window.

    Args:
      steps: batches of a window, at least 1.
      reduction: "mean" divides the sum by `steps`; "sum" does not.
      exchange: when gradients are all-reduced and judged: with each "window" or each "batch".
      loss_scale: when the loss scale moves: with each "window" or each "batch"; as `exchange` if None.
    Raises:
      TypeError: `steps` is not an integer.
      ValueError: an argument is out of its range, or the loss scale would move with other steps than are judged.
    Graph: a variable of each trained variable's shape, a boolean for each row of sparse ones, and a counter; all are
      saved. On several ranks sums are each rank's own: run `sync_all` before rank 0 writes a checkpoint in the middle
      of a window. With `exchange="batch"` they are the same on all ranks.
    """

    place = "accumulate"
    needs = ("a verdict",)
    needs_variables = True
    spans_batches = True

    def __init__(self, steps: int, reduction: str = "mean", exchange: str = "window", loss_scale: str | None = None):
        fix = "Use 1 for an update with each batch."
        self._steps = check_count("Accumulate", "steps", steps, fix, at_most=2**31 - 1)
        fix = "Use 'mean' for a loss that is a mean over the batch."
        self._reduction = check_choice("Accumulate", "reduction", reduction, ("mean", "sum"), fix)
        _check_moments(exchange, loss_scale)
        self._reduces_batches = exchange == "batch"
        self._scales_batches = (loss_scale or exchange) == "batch"
        self._sums: _Sums | None = None
        self.place = "accumulate reduced" if self._reduces_batches else "accumulate"
        # A mean of usable gradients is usable, a sum need not be.
        self.keeps_usable = reduction == "mean"

    def __copy__(self):
        return type(self)(**self.get_config())

    def get_config(self):
        config = {"steps": self._steps, "reduction": self._reduction}
        if self._reduces_batches:
            return {**config, "exchange": "batch"}
        return {**config, "loss_scale": "batch"} if self._scales_batches else config

    def sent_bytes(self, others, ranks):
        return others if self._reduces_batches else others / self._steps

    def state(self):
        if self._sums is None:
            self._sums = _Sums()
        return {"accumulated": self._sums.module}

    def make_variables(self, variables):
        self.state()
        for variable in variables:
            self._sums.of(variable, may_be_sparse=variable.shape.rank > 0)

    def variables_of_this_rank(self):
        if self._reduces_batches:
            return []
        return [variable for variable in self.state()["accumulated"].variables if variable is not self._sums.counter]

    def prepare(self, step):
        self.state()
        for grad, variable in step.grads_and_vars:
            if grad is not None:
                self._sums.of(variable, may_be_sparse=isinstance(grad, tf.IndexedSlices))

    def collect(self, step):
        if self._reduces_batches:
            return
        step.notes[self] = notes = self._added(step)
        step.is_due = notes.is_last
        if self._scales_batches and step.scales and not step.judged:
            judge(step, step.loss_id, step.gradients, step.divisor)

    def local(self, step):
        if self._reduces_batches:
            return
        with tf.name_scope("Accumulate"):
            step.grads_and_vars = self._totals(step)

    def reduced(self, step):
        if not self._reduces_batches:
            return
        step.notes[self] = notes = self._added(step)
        pairs = step.grads_and_vars

        def total():
            return [part for grad, _ in self._totals(step) if grad is not None for part in parts_of(grad)]

        def nothing():
            zeros = [nothing_like(grad, variable) for grad, variable in pairs if grad is not None]
            return [part for grad in zeros for part in parts_of(grad)]

        with tf.name_scope("Accumulate"):
            tensors = iter(tensors_if(notes.is_last, total, nothing) if step.gradients else [])
            step.grads_and_vars = [
                (None if grad is None else rebuilt(grad, variable, tensors), variable) for grad, variable in pairs
            ]

    def gate(self, step, apply):
        if self not in step.notes:
            raise gradients_from_elsewhere("Accumulate", "these gradients were not accumulated")
        if not self._reduces_batches:
            return apply()
        # Here, behind the verdict: a batch that is left out does not count.
        update = run_if(step.notes[self].is_last, apply)
        kept = self._keep(step)
        return update if update is None or tf.executing_eagerly() else tf.group(update, kept)

    def after(self, step):
        return None if self._reduces_batches else self._keep(step)

    def _added(self, step):
        """This batch's gradients added to those before."""
        sums, pairs = self._sums, step.grads_and_vars
        kept = [
            None if grad is None else sums.of(variable, may_be_sparse=isinstance(grad, tf.IndexedSlices))
            for grad, variable in pairs
        ]
        with tf.name_scope("Accumulate"):
            counted = sums.counter.read_value()
            is_last = counted >= self._steps - 1  # more than that in a window which began with more steps
            windows = [None] * len(pairs)
            # In the order in which the backward pass delivers: what reduces them looks for that order.
            for position in sorted(range(len(pairs)), key=readiness_of([grad for grad, _ in pairs])):
                if kept[position] is not None:
                    addend = self._addend(pairs[position][0], kept[position], step)
                    windows[position] = kept[position].added(addend)
        return _Notes(counted, is_last, windows)

    def _totals(self, step):
        """The sums of the window so far, multiplied as the gradients of this batch are."""
        windows = step.notes[self].windows

        def as_computed(position, grad):
            total = windows[position].total()
            if step.divisor is not None:  # multiplied again, to be all-reduced
                total = map_values(total, lambda values: values * tf.cast(step.divisor, values.dtype))
            return map_values(total, lambda values: tf.cast(values, values_of(grad).dtype))

        return [
            (None if grad is None else as_computed(position, grad), variable)
            for position, (grad, variable) in enumerate(step.grads_and_vars)
        ]

    def _keep(self, step):
        """Keeps the sums for the next batch, or empties them after the last one; returns the op."""
        notes = step.notes[self]
        used = [values_of(grad) for grad in step.delivered if grad is not None]
        with tf.name_scope("Accumulate"), tf.control_dependencies(used):
            counted = self._sums.counter.assign(tf.where(notes.is_last, 0, notes.counted + 1))
            kept = [window.keep(notes.is_last) for window in notes.windows if window is not None]
        return None if tf.executing_eagerly() else tf.group(counted, *kept)

    def _addend(self, grad, kept, step):
        addend = in_true_units(map_values(grad, lambda values: tf.cast(values, kept.sum.dtype)), step.divisor)
        return map_values(addend, lambda values: values / self._steps) if self._reduction == "mean" else addend


class _Notes(NamedTuple):
    """What one step keeps for its later hooks.

    Attributes:
      counted: batches of the window before this one.
      is_last: whether this is the last one.
      windows: what each gradient was added to.
    """

    counted: tf.Tensor
    is_last: tf.Tensor
    windows: list


def _check_moments(exchange, loss_scale):
    for name, moment in (("exchange", exchange), ("loss_scale", loss_scale or exchange)):
        fix = "Leave it out for one that happens once in a window."
        check_choice("Accumulate", name, moment, ("window", "batch"), fix)
    if exchange == "batch" and loss_scale == "window":
        problem = "the loss scale would not move with what is judged"
        got, fix = "loss_scale='window' and exchange='batch'", "Leave loss_scale out."
        raise ValueError(message("Accumulate", problem, "loss_scale='batch' with exchange='batch'", got, fix))


class _Sums:
    """The variables of one optimizer's accumulation.

    Attributes:
      module: holds all of them, for checkpoints.
      counter: batches of the window so far, an int32 scalar.
    """

    def __init__(self):
        self._kept: dict = {}
        self.module = tf.Module(name="accumulated")
        self.counter = self.module.counter = state_variable(lambda: tf.zeros([], tf.int32), "accumulated_steps")

    def of(self, variable: Any, may_be_sparse: bool) -> _Sum:
        """What is kept for a trained variable, made now if it does not exist yet."""
        kept = self._kept.get(variable.ref())
        if kept is None:
            kept = self._kept[variable.ref()] = _Sum(variable)
            setattr(self.module, f"sum_{len(self._kept) - 1}", kept)  # where object-based checkpoints find it
        if may_be_sparse:
            kept.make_sparse()
        return kept


class _Sum(tf.Module):
    """The sum of one variable's gradients.

    Attributes:
      sum: what was added up in this window, in true units.
      touched: for each row whether a sparse gradient had it; None where no gradient was sparse.
    """

    def __init__(self, variable):
        super().__init__(name="sum")
        self._name = variable.name.partition(":")[0]
        dtype = tf.float64 if variable.dtype.base_dtype == tf.float64 else tf.float32
        self.sum = variable_like(variable, "Accumulate", "accumulated", dtype)
        self.touched = None

    def make_sparse(self):
        if self.touched is None:
            name = f"accumulated/{self._name}_rows"
            self.touched = state_variable(lambda: tf.zeros(self.sum.shape[:1], tf.bool), name)

    def added(self, addend):
        """The sum with one more gradient, which `keep` keeps."""
        return (_SparseWindow if isinstance(addend, tf.IndexedSlices) else _DenseWindow)(self, addend)


class _DenseWindow:
    def __init__(self, kept, addend):
        self._kept = kept
        self._total = kept.sum.read_value() + addend

    def total(self):
        return self._total

    def keep(self, is_due):
        (value,) = tensors_if(is_due, lambda: [tf.zeros_like(self._total)], lambda: [tf.identity(self._total)])
        return self._kept.sum.assign(value)


class _SparseWindow:
    def __init__(self, kept, addend):
        self._kept = kept
        self._addend = addend

    def total(self):
        """The rows that this window has touched, each once and in ascending order."""
        indices = tf.cast(self._addend.indices, tf.int64)
        rows = tf.where(self._with_own_rows(self._kept.touched.read_value()))[:, 0]
        positions = tf.searchsorted(rows, indices)[:, tf.newaxis]
        values = tf.tensor_scatter_nd_add(tf.gather(self._kept.sum, rows), positions, self._addend.values)
        shape = self._kept.sum.shape.as_list()
        return tf.IndexedSlices(values, tf.cast(rows, self._addend.indices.dtype), tf.constant(shape))

    def keep(self, is_due):
        added = run_if(tf.logical_not(is_due), self._add)
        cleared = run_if(is_due, self._clear)
        return None if tf.executing_eagerly() else tf.group(added, cleared)

    def _with_own_rows(self, touched):
        indices = self._addend.indices[:, tf.newaxis]
        return tf.tensor_scatter_nd_update(touched, indices, tf.ones_like(self._addend.indices, tf.bool))

    def _add(self):
        kept = self._kept
        touched = kept.touched.assign(self._with_own_rows(kept.touched.read_value()))
        added = kept.sum.scatter_add(self._addend)
        return None if tf.executing_eagerly() else tf.group(touched, added)

    def _clear(self):
        kept = self._kept
        rows = tf.where(kept.touched.read_value())[:, 0]
        zeros = tf.zeros([tf.size(rows), *kept.sum.shape[1:]], kept.sum.dtype)
        cleared = kept.sum.scatter_update(tf.IndexedSlices(zeros, rows))
        with tf.control_dependencies([rows]):
            forgotten = kept.touched.assign(tf.zeros_like(kept.touched))
        return None if tf.executing_eagerly() else tf.group(cleared, forgotten)
