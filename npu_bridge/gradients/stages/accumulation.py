"""Accumulates gradients: adds up those of several batches and applies them once."""

from __future__ import annotations

from npu_bridge.base.arguments import check_choice, check_count
from npu_bridge.base.errors import message
from npu_bridge.base.own_tensorflow import tf
from npu_bridge.gradients.accumulated_sums import AccumulationWindow, GradientSums
from npu_bridge.gradients.arithmetic import (
    gradient_from_parts,
    gradient_parts,
    in_true_units,
    map_values,
    sum_repeated_rows,
    values_of,
    zero_gradient_like,
)
from npu_bridge.gradients.graph_mode import run_if, tensors_if
from npu_bridge.gradients.stage import Stage, gradients_from_elsewhere


@tf.keras.utils.register_keras_serializable(package="npu_bridge")
class Accumulate(Stage):
    """Adds up the gradients of `steps` batches on each rank; only the last batch of such a window updates.

    Each window has one all-reduce, one decision about overflows, one update, one count of
    `global_step` (or `iterations`, which schedules read) and one move of the loss scale. If the gradients of one batch
    are not usable, the whole window is dropped and the next one begins with zeros. With "mean" and a loss that is a
    mean over the batch, a window trains like one batch of all its examples.

    Before the last batch `compute_gradients` returns zeros, and sparse gradients without rows. The gradients of the
    window come with its last batch: clip these. Sums are kept in true units, so that the loss scale can move in
    between, in float32 (float64 for float64 gradients). A sparse gradient stays sparse: the update gets the rows that
    any batch of the window has touched.

    Two of these can happen with every batch instead. With `exchange="batch"` every batch is all-reduced and judged by
    itself; one that overflows is dropped, and the window lasts until it has `steps` usable batches.
    With `loss_scale="batch"` the loss scale moves with every batch; all else happens once in a window.

    Args:
      steps: batches of a window, at least 1.
      reduction: "mean" divides the sum by `steps`; "sum" does not.
      exchange: when gradients are all-reduced and judged: with each "window" or each "batch".
      loss_scale: when the loss scale moves: with each "window" or each "batch"; as `exchange` if None.
    Raises:
      TypeError: `steps` is not an integer.
      ValueError: an argument is out of its range, or the loss scale would move with other steps than are judged.
    Graph: a variable of each trained variable's shape, a boolean for each row of sparse ones, and a counter; all are
      saved. With several ranks the sums are each rank's own: run `sync_all` before rank 0 writes a checkpoint in the
      middle of a window. With `exchange="batch"` they are the same on all ranks.
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
        self._sums: GradientSums | None = None
        self.place = "accumulate reduced" if self._reduces_batches else "accumulate"
        # A mean of usable gradients is usable, but a sum can overflow.
        self.keeps_usable = reduction == "mean"

    @property
    def batches_so_far(self):
        return None if self._sums is None else self._sums.counter

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
            self._sums = GradientSums(type(self).__name__)
        return {"accumulated": self._sums.module}

    def variables_of_this_rank(self):
        if self._reduces_batches:
            return []
        return [variable for variable in self.state()["accumulated"].variables if variable is not self._sums.counter]

    def create_variables(self, variables, gradients=None):
        self.state()
        for position, variable in enumerate(variables):
            is_known = gradients is not None
            is_sparse = isinstance(gradients[position], tf.IndexedSlices) if is_known else variable.shape.rank > 0
            self._sums.of(variable, may_be_sparse=is_sparse)

    def weighed(self, values: tf.Tensor, counted: tf.Tensor) -> tf.Tensor:
        """Returns the addend of a batch to the sum of a gradient.

        Args:
          values: the gradient of this batch, in true units.
          counted: number of earlier batches of the window, an int32 scalar.
        """
        return values / self._steps if self._reduction == "mean" else values

    # When windows are exchanged, batches are added up before the reduction, and only the last one is reduced.

    def accumulate(self, step):
        if self._reduces_batches:
            return
        step.notes[self] = window = self._with_batch(step)
        step.is_due = window.is_last
        losses = step.losses
        if self._scales_batches and losses.scales and not losses.usable:
            losses.judge(losses.latest, step.gradients, step.divisor)

    def before_reduce(self, step):
        if not self._reduces_batches:
            with tf.name_scope("Accumulate"):
                step.grads_and_vars = step.notes[self].totals(step)

    # When batches are exchanged, reduced gradients are added up, and the update waits for the last batch.

    def after_reduce(self, step):
        if not self._reduces_batches:
            return
        step.notes[self] = window = self._with_batch(step)
        pairs = step.grads_and_vars

        def total():
            return [part for grad, _ in window.totals(step) if grad is not None for part in gradient_parts(grad)]

        def nothing():
            zeros = [zero_gradient_like(grad, variable) for grad, variable in pairs if grad is not None]
            return [part for grad in zeros for part in gradient_parts(grad)]

        with tf.name_scope("Accumulate"):
            tensors = iter(tensors_if(window.is_last, total, nothing) if step.gradients else [])
            step.grads_and_vars = [
                (None if grad is None else gradient_from_parts(grad, variable, tensors), variable)
                for grad, variable in pairs
            ]

    def gate(self, step, update):
        if self not in step.notes:
            raise gradients_from_elsewhere("Accumulate", "these gradients were not accumulated")
        if not self._reduces_batches:
            return update()
        # After the verdict: a dropped batch does not count.
        updated = run_if(step.notes[self].is_last, update)
        kept = self._keep(step)
        return updated if updated is None or tf.executing_eagerly() else tf.group(updated, kept)

    def after_update(self, step):
        return None if self._reduces_batches else self._keep(step)

    def _with_batch(self, step):
        """Returns the window with this batch's gradients added, in true units."""

        def addend(grad, dtype, counted):
            wide = map_values(grad, lambda values: tf.cast(values, dtype))
            if isinstance(wide, tf.IndexedSlices) and step.divisor is not None and not self._reduces_batches:
                # Summed while scaled, like a dense gradient: so overflows do not depend on how batches are dealt.
                wide = sum_repeated_rows(wide)
            return map_values(in_true_units(wide, step.divisor), lambda values: self.weighed(values, counted))

        with tf.name_scope("Accumulate"):
            return AccumulationWindow(self._sums, self._steps, step.grads_and_vars, addend)

    def _keep(self, step):
        """Keeps the sums for the next batch, or empties them after the last one; returns the op."""
        used = [values_of(grad) for grad in step.delivered if grad is not None]
        with tf.name_scope("Accumulate"), tf.control_dependencies(used):
            return step.notes[self].keep()


def _check_moments(exchange, loss_scale):
    for name, moment in (("exchange", exchange), ("loss_scale", loss_scale or exchange)):
        fix = "Leave it out for one that happens once in a window."
        check_choice("Accumulate", name, moment, ("window", "batch"), fix)
    if exchange == "batch" and loss_scale == "window":
        problem = "the loss scale would move with other steps than are judged"
        got, fix = "loss_scale='window' and exchange='batch'", "Leave loss_scale out."
        raise ValueError(message("Accumulate", problem, "loss_scale='batch' with exchange='batch'", got, fix))
