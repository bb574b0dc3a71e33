"""Accumulates gradients: weights the gradient of each batch, adds up several, and applies the sum once."""

from __future__ import annotations

from npu_bridge.base.arguments import check_choice, check_count
from npu_bridge.base.errors import message
from npu_bridge.base.own_tensorflow import tf
from npu_bridge.gradients.arithmetic import gradient_values, map_values, sum_repeated_rows, unscale_gradient
from npu_bridge.gradients.graph_mode import group_with_update, make_tensors_if, run_if
from npu_bridge.gradients.stage import VERDICT, SummingStage, unknown_gradients_error
from npu_bridge.gradients.stages.accumulated_sums import AccumulationWindow, GradientSums


@tf.keras.utils.register_keras_serializable(package="npu_bridge")
class Accumulate(SummingStage):
    """Adds up the gradients of a window of `steps` batches on each rank, and updates with the last batch of the window.

    Each window has one all-reduce, one overflow check, one update, one increment of `global_step` (or `iterations`,
    which schedules read) and one change of the loss scale. With several losses or groups, their scales change with
    every batch. If the gradients of one batch overflow, the whole window is dropped, and the next window begins with
    zeros. With "mean" and a loss that is a mean over the batch, a window trains like one large batch.

    Before the last batch, `compute_gradients` returns zeros, or no rows for sparse gradients. The last batch returns
    the gradients of the window: clip these. Sums are stored without the loss scale, so that the scale can change within
    a window. Sums have float32, or float64 for float64 gradients. A sparse gradient stays sparse: the update gets all
    rows that occurred in the window. Variables that are trained in separate steps, as in a GAN, have separate windows.

    With `exchange="batch"`, every batch is all-reduced and checked separately. A batch that overflows is dropped, and
    the window lasts until it has `steps` batches without overflow. With `loss_scale="batch"`, only the loss scale
    changes with every batch.

    Args:
      steps: number of batches in a window, at least 1.
      reduction: "mean" divides the sum by `steps`; "sum" does not.
      exchange: how often gradients are all-reduced and checked: once in each "window" or "batch".
      loss_scale: how often the loss scale changes: once in each "window" or "batch"; None for the value of `exchange`.
    Raises:
      TypeError: `steps` is not an integer.
      ValueError: an argument is out of its range, or `loss_scale="window"` is combined with `exchange="batch"`.
    Graph: a variable in the shape of each trained variable, a boolean for each row of sparse gradients, and a counter;
      all are saved. With several ranks the sums differ between ranks: run `sync_all` before rank 0 writes a checkpoint
      within a window. With `exchange="batch"` they are equal on all ranks.
    """

    place = "accumulate"
    needs = (VERDICT,)
    needs_variables = True
    needs_unscaled_gradients = True

    def __init__(self, steps: int, reduction: str = "mean", exchange: str = "window", loss_scale: str | None = None):
        fix = "Use 1 for an update with each batch."
        self.batches = check_count("Accumulate", "steps", steps, fix, at_most=2**31 - 1)
        fix = "Use 'mean' for a loss that is a mean over the batch."
        self._reduction = check_choice("Accumulate", "reduction", reduction, ("mean", "sum"), fix)
        _check_frequencies(exchange, loss_scale)
        self._reduces_batches = exchange == "batch"
        self._scales_batches = (loss_scale or exchange) == "batch"
        self._sums: GradientSums | None = None
        self.place = "accumulate reduced" if self._reduces_batches else "accumulate"
        # A mean of finite gradients is finite, but a sum can overflow.
        self.keeps_usable = reduction == "mean"

    @property
    def batch_counters(self) -> list:
        return [] if self._sums is None else self._sums.counters.counters

    def get_config(self):
        config = {"steps": self.batches, "reduction": self._reduction}
        if self._reduces_batches:
            return {**config, "exchange": "batch"}
        return {**config, "loss_scale": "batch"} if self._scales_batches else config

    def sent_bytes(self, other_bytes, ranks):
        return other_bytes if self._reduces_batches else other_bytes / self.batches

    def state(self):
        if self._sums is None:
            self._sums = GradientSums(type(self).__name__)
        return {"accumulated": self._sums.module}

    def variables_of_this_rank(self):
        if self._reduces_batches:
            return []
        counters = {counter.ref() for counter in self.batch_counters}
        return [variable for variable in self.state()["accumulated"].variables if variable.ref() not in counters]

    def create_variables(self, variables, gradients=None):
        self.state()
        for position, variable in enumerate(variables):
            is_known = gradients is not None
            is_sparse = isinstance(gradients[position], tf.IndexedSlices) if is_known else variable.shape.rank > 0
            self._sums.sum_of(variable, may_be_sparse=is_sparse)
        if gradients is not None:
            self._sums.counters.counter_of(variables)  # here, outside of name scopes
            self._sums.warn_about_mixed_lists()

    def weighted_batch_term(self, values: tf.Tensor, earlier_batches: tf.Tensor) -> tf.Tensor:
        """Returns the term that a batch adds to the sum of a gradient.

        Args:
          values: the unscaled gradient of this batch.
          earlier_batches: number of earlier batches in the window, an int32 scalar.
        """
        return values / self.batches if self._reduction == "mean" else values

    # When windows are exchanged, batches are added up before the reduction, and only the last one is reduced.

    def each_batch(self, step):
        if self._reduces_batches:
            return
        step.notes[self] = window = self._add_batch(step)
        step.is_due = window.is_last
        losses = step.losses
        if self._scales_batches and losses.scales and not losses.usable:
            losses.record_finiteness(losses.latest, step.gradients, step.divisor)
        if losses.usable:
            (losses.sums_usable,) = make_tensors_if(
                window.is_last, lambda: [window.are_sums_finite()], lambda: [tf.constant(True)]
            )

    def before_reduce(self, step):
        if not self._reduces_batches:
            with tf.name_scope("Accumulate"):
                step.grads_and_vars = step.notes[self].window_sums(step)

    # When batches are exchanged, reduced gradients are added up, and the update waits for the last batch.

    def add_reduced(self, step):
        step.notes[self] = window = self._add_batch(step)
        return window.is_last

    def after_reduce(self, step):
        if self._reduces_batches:
            with tf.name_scope("Accumulate"):
                step.grads_and_vars = step.notes[self].window_sums(step)

    def gate(self, step, update):
        if self not in step.notes:
            raise unknown_gradients_error("Accumulate", "these gradients were not accumulated")
        if not self._reduces_batches:
            return update()
        # After the verdict: a dropped batch does not count.
        updated = run_if(step.notes[self].is_last, update)
        return group_with_update(updated, self._store_sums(step))

    def after_update(self, step):
        return None if self._reduces_batches else self._store_sums(step)

    def _add_batch(self, step):
        """Returns the sums of the gradients since the last update, with the unscaled gradients of this batch."""

        def addend(grad, dtype, counted):
            wide = map_values(grad, lambda values: tf.cast(values, dtype))
            if isinstance(wide, tf.IndexedSlices) and step.divisor is not None and not self._reduces_batches:
                # Summed while scaled, like a dense gradient: overflows then do not depend on the split into batches.
                wide = sum_repeated_rows(wide)
            return map_values(
                unscale_gradient(wide, step.divisor), lambda values: self.weighted_batch_term(values, counted)
            )

        with tf.name_scope("Accumulate"):
            return AccumulationWindow(self._sums, self.batches, step.grads_and_vars, addend)

    def _store_sums(self, step):
        """Stores the sums for the next batch, or resets them to 0 after the last batch; returns the op."""
        used = [gradient_values(grad) for grad in step.delivered if grad is not None]
        used += [] if step.losses.sums_usable is None else [step.losses.sums_usable]
        with tf.name_scope("Accumulate"), tf.control_dependencies(used):
            return step.notes[self].store_or_reset()


def _check_frequencies(exchange, loss_scale):
    for name, moment in (("exchange", exchange), ("loss_scale", loss_scale or exchange)):
        fix = f"Leave {name} out for once in a window."
        check_choice("Accumulate", name, moment, ("window", "batch"), fix)
    if exchange == "batch" and loss_scale == "window":
        problem = "the loss scale cannot change once in a window if every batch is checked"
        got, fix = "loss_scale='window' and exchange='batch'", "Leave loss_scale out."
        raise ValueError(message("Accumulate", problem, "loss_scale='batch' with exchange='batch'", got, fix))
