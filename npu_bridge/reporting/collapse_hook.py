"""Holds hooks that end a training in which every step is skipped, or a step with a NaN loss is applied."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import tensorflow as tf

from npu_bridge import collective
from npu_bridge.base.arguments import check_count
from npu_bridge.base.errors import message
from npu_bridge.base.tf_internals.graphs import opened_for_changes
from npu_bridge.gradients.collections import LOSS_SCALE_STATE, STEP_SKIPPED
from npu_bridge.gradients.skips_in_a_row import MOST_IN_A_ROW
from npu_bridge.graph.operators import BACK_EDGES, needed_ops
from npu_bridge.graph.run import run_of
from npu_bridge.graph.variables import global_step_of
from npu_bridge.reporting.step_hook import Observation, StepHook
from npu_bridge.session import precision
from npu_bridge.session.overflow_hook import describe_operator, find_first_non_finite

_LOWEST_USEFUL_SCALE = 1.0
_TRANSFERS = ("Horovod", "Collective")
_CONCISE_HEALTH = 3  # of `DebugNumericSummaryV2`: identity, size, and the counts of -Inf, Inf and NaN


class LossScaleCollapseError(RuntimeError):
    """Every step is skipped, and no other loss scale would help."""


class _LocalValues(NamedTuple):
    """Results of the operators of a run that need no other rank: the loss, and the worst value of each tensor."""

    ops: tuple
    fed: list
    worst: dict
    loss: float | None


class LossScaleCollapseHook(StepHook):
    """A hook that raises when step after step is skipped at a loss scale that cannot become smaller.

    This is a dynamic scale that has come down to 1, or a fixed one. While a scale is on its way down, skipped steps are
    normal. Before it raises, one more batch is computed without an update, to find out whether the loss or only its
    gradients are bad, and which operator made the first NaN or Inf.

    Args:
      most_in_a_row: the number of consecutive session runs that may be skipped.
    Raises:
      ValueError: `most_in_a_row` is below 1.
      LossScaleCollapseError: after a step, when this has happened.
    Ranks: all see the same skipped steps and raise after the same one; each examines its own numbers.
    Example: est.train(input_fn, hooks=[LossScaleCollapseHook(most_in_a_row=1000)]) waits longer than the default 100.
    """

    def __init__(self, most_in_a_row: int = MOST_IN_A_ROW):
        super().__init__()
        check_count("LossScaleCollapseHook", "most_in_a_row", most_in_a_row, "Leave it out for 100.")
        self._most_in_a_row = most_in_a_row
        self._feeds = None

    def after_run(self, run_context, run_values):
        """Keeps the feeds of the run for one more run."""
        self._feeds = run_context.original_args.feed_dict
        super().after_run(run_context, run_values)

    def on_step(self, session, observation: Observation) -> None:
        """Raises if too many steps were skipped since the scale last moved."""
        if self._skips.count >= self._most_in_a_row and self._is_at_its_end(session.graph):
            raise LossScaleCollapseError(self._explanation(session))

    def _is_at_its_end(self, graph):
        scale = self._skips.scale
        return scale is not None and (scale <= _LOWEST_USEFUL_SCALE or not graph.get_collection(LOSS_SCALE_STATE))

    def _explanation(self, session):
        what = (
            f"LossScaleCollapseHook: {self._skips.count} steps in a row were skipped at a loss scale of "
            f"{self._skips.scale:g}, "
            f"after step {self.read_step(session)}"
        )
        try:
            look = self._look(session)
        except tf.errors.OpError as error:
            return f"{what}. Another batch could not be examined: {error.message.splitlines()[0]}"
        origin = find_first_non_finite(look.ops, look.fed, look.worst)
        if origin is None:
            elsewhere = "They come from another rank, or only" if collective.current().size > 1 else "Only"
            return f"{what}. The next batch has no NaN or Inf on this rank. {elsewhere} some batches cause one."
        return (
            f"{what}. {_state_of(look.loss)}The first NaN or Inf comes from {describe_operator(origin.origin)}. No "
            f"loss scale helps against that: keep what goes into this operator where it is finite, or, if it computes "
            f"in 16 bits, keep it in float32 with keep_dtype_scope()."
        )

    def _look(self, session):
        """Computes the part of a batch that needs no other ranks, as another rank may fail where this one does not.

        TensorFlow does not lower fetched operators. So it fetches added operators that check the outputs of others.

        Graph: an operator for each tensor, also in a finalized graph: the training is about to end.
        """
        graph = session.graph
        run = run_of(graph, [self._fetches.get("loss", []), graph.get_collection(STEP_SKIPPED)], self._feeds)
        local = _without_transfers(run)
        here = [*run.fed, *(tensor for op in local for tensor in op.outputs)]
        seen = [tensor for tensor in here if tensor.dtype.is_floating and tensor.name in run.values]
        with opened_for_changes(graph), graph.as_default(), tf.control_dependencies(None):
            checks = [tf.raw_ops.DebugNumericSummaryV2(input=each, tensor_debug_mode=_CONCISE_HEALTH) for each in seen]
            for check in checks:
                precision.mark(check.op)
        losses = [tensor for tensor in seen if tensor is self._fetches.get("loss")]
        with precision.as_last_step(session):
            counts, loss = session.run([checks, losses], self._feeds)
        worst = {tensor.name: _worst_of_counts(*count[2:]) for tensor, count in zip(seen, counts)}
        return _LocalValues(local, run.fed, worst, float(np.mean(loss)) if loss else None)


class LossIsNanError(tf.estimator.NanLossDuringTrainingError):
    """The error of `tf.estimator` for a NaN loss, with the step and a fix."""

    def __init__(self, step: int):
        super().__init__()
        self._step = step

    def __str__(self) -> str:
        fix = "Lower the learning rate, or look for a log(0), a 0/0 or a NaN in the batch."
        return message("loss", "it is NaN", "a number", f"NaN in step {self._step}", fix)


class NanLossHook(tf.estimator.SessionRunHook):
    """A hook that ends a training whose loss is NaN in a step that was not skipped; a skipped one changes nothing.

    Args:
      hook: a `tf.estimator.NanTensorHook`, which ends it after any step.
    Raises:
      NanLossDuringTrainingError: (of `tf.estimator`) after such a step.
    Ranks: local.
    """

    def __init__(self, hook: tf.estimator.NanTensorHook):
        self._hook = hook
        self._skipped = self._global_step = None

    def begin(self):
        """Finds the tensor that tells whether the step is skipped, if there is one."""
        deciding = tf.compat.v1.get_collection(STEP_SKIPPED)
        self._skipped = deciding[-1] if deciding else []
        self._global_step = global_step_of()

    def before_run(self, run_context):
        """Fetches the loss, and whether the step is skipped."""
        return tf.estimator.SessionRunArgs([self._skipped, self._hook.before_run(run_context).fetches])

    def after_run(self, run_context, run_values):
        """Checks the loss of a step that was not skipped."""
        skipped, loss = run_values.results
        try:
            if not skipped:
                self._hook.after_run(run_context, run_values._replace(results=loss))
        except tf.estimator.NanLossDuringTrainingError:
            step = run_context.session.run(self._global_step) if self._global_step is not None else 0
            raise LossIsNanError(int(step)) from None


def _without_transfers(run) -> tuple:
    """Returns the operators of a run that need nothing from other ranks."""
    fed = {tensor.op for tensor in run.fed}
    local = dict.fromkeys(fed)
    for op in run.ops:
        is_here = all(other in local or other.type in BACK_EDGES for other in needed_ops(op))
        if is_here and not op.type.startswith(_TRANSFERS):
            local[op] = None
    return tuple(op for op in local if op not in fed)


def _worst_of_counts(minus_inf, inf, nan):
    return np.nan if nan else np.inf if inf or minus_inf else 0.0


def _state_of(loss):
    if loss is None:
        return ""
    return "The loss is finite, its gradients are not. " if np.isfinite(loss) else f"The loss itself is {loss:g}. "
