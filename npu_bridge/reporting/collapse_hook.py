"""Holds hooks that end a training: one if every step is skipped, one if a step with a NaN loss is applied."""

from __future__ import annotations

import numpy as np
import tensorflow as tf

from npu_bridge import collective
from npu_bridge.base.arguments import check_count
from npu_bridge.base.errors import message
from npu_bridge.base.tf_internals.graphs import allow_graph_changes
from npu_bridge.gradients.collections import COLLAPSE_HOOKS, STEP_SKIPPED, latest_decision, pipelines_in
from npu_bridge.gradients.steps.skips_in_a_row import MOST_IN_A_ROW
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
    """Raised when every step is skipped, and no other loss scale would help."""


class LossScaleCollapseHook(StepHook):
    """A hook that raises an error if step after step is skipped, and the loss scale cannot become smaller.

    A fixed scale cannot become smaller, nor can a dynamic scale that has reached 1 or its own lower limit. While a
    larger dynamic scale goes down, skipped steps are normal. Before the hook raises its error, it computes one more
    batch without an update. This shows whether the loss or only its gradients are bad, and which operator made the
    first NaN or Inf.

    Args:
      most_in_a_row: the allowed number of consecutive session runs that skip an update.
    Raises:
      ValueError: `most_in_a_row` is below 1.
      LossScaleCollapseError: after the step that exceeds the allowed number.
    Ranks: all ranks see the same skipped steps and raise the error after the same step. Each rank examines its own
      numbers.
    Example: est.train(input_fn, hooks=[LossScaleCollapseHook(most_in_a_row=1000)]) allows more than the default of 100.
    """

    def __init__(self, most_in_a_row: int = MOST_IN_A_ROW):
        super().__init__()
        check_count("LossScaleCollapseHook", "most_in_a_row", most_in_a_row, "Leave most_in_a_row out for 100.")
        self._most_in_a_row = most_in_a_row
        self._feeds = None

    def begin(self):
        """Finds the tensors of the graph, and notes in the graph that this hook is there."""
        super().begin()
        self._graph.add_to_collection(COLLAPSE_HOOKS, type(self).__name__)

    def after_run(self, run_context, run_values):
        """Keeps the feeds of the run, for one more run with the same feeds."""
        self._feeds = run_context.original_args.feed_dict
        super().after_run(run_context, run_values)

    def on_step(self, session, observation: Observation) -> None:
        """Raises an error if too many steps were skipped since the scale last changed."""
        if self._skips.count >= self._most_in_a_row and self._is_scale_at_limit(session.graph):
            raise LossScaleCollapseError(self._explain_collapse(session))

    def _is_scale_at_limit(self, graph):
        scale = self._skips.scale
        if scale is None or scale <= _LOWEST_USEFUL_SCALE:
            return scale is not None
        managers = [manager for pipeline in pipelines_in(graph) for manager in pipeline.loss_scale_managers]
        return not any(hasattr(manager, "can_lower") and manager.can_lower(scale) for manager in managers)

    def _explain_collapse(self, session):
        what = (
            f"LossScaleCollapseHook: {self._skips.count} steps in a row were skipped at a loss scale of "
            f"{self._skips.scale:g}, "
            f"after step {self.read_step(session)}"
        )
        try:
            origin, loss = self._examine_next_batch(session)
        except tf.errors.OpError as error:
            return f"{what}. Another batch could not be examined: {error.message.splitlines()[0]}"
        if origin is None:
            elsewhere = "another rank, or from " if collective.current().size > 1 else ""
            return (
                f"{what}. The next batch has no NaN or Inf on this rank. They come from {elsewhere}some batches only."
            )
        return (
            f"{what}. {_describe_loss(loss)}The first NaN or Inf comes from {describe_operator(origin.origin)}. "
            f"No loss scale helps: bound the inputs of this operator so that its results are finite, or, if it "
            f"computes in 16 bits, keep it in float32 with keep_dtype_scope()."
        )

    def _examine_next_batch(self, session):
        """Returns which operator of a batch made the first NaN or Inf, if any did, and the loss, if it is known.

        Computes only what needs no other rank: if one rank fails here, no other rank waits for it.

        TensorFlow does not lower the precision of fetched operators. So operators that check the outputs of the
        original operators are added, and only the added ones are fetched.

        Graph: an operator for each tensor, also in a finalized graph, as the training is about to end.
        """
        graph = session.graph
        run = run_of(graph, [self._fetches.get("loss", []), graph.get_collection(STEP_SKIPPED)], self._feeds)
        local = _list_rank_local_ops(run)
        here = [*run.fed, *(tensor for op in local for tensor in op.outputs)]
        seen = [tensor for tensor in here if tensor.dtype.is_floating and tensor.name in run.values]
        with allow_graph_changes(graph), graph.as_default(), tf.control_dependencies(None):
            checks = [tf.raw_ops.DebugNumericSummaryV2(input=each, tensor_debug_mode=_CONCISE_HEALTH) for each in seen]
            for check in checks:
                precision.exempt_operator(check.op)
        losses = [tensor for tensor in seen if tensor is self._fetches.get("loss")]
        with precision.with_policy_of_last_step(session):
            counts, loss = session.run([checks, losses], self._feeds)
        worst = {tensor.name: _worst_nonfinite_value(*count[2:]) for tensor, count in zip(seen, counts)}
        return find_first_non_finite(local, run.fed, worst), float(np.mean(loss)) if loss else None


class LossIsNanError(tf.estimator.NanLossDuringTrainingError):
    """A `NanLossDuringTrainingError` of `tf.estimator` whose message has the step and a cure."""

    def __init__(self, step: int):
        super().__init__()
        self._step = step

    def __str__(self) -> str:
        fix = "Lower the learning rate, or look for a log(0), a 0/0 or a NaN in the batch."
        return message("loss", "it is NaN", "a number", f"NaN in step {self._step}", fix)


class NanLossHook(tf.estimator.SessionRunHook):
    """A hook that ends a training if the loss is NaN in a step that is not skipped; skipped steps change nothing.

    While gradients are accumulated, a NaN waits for the step that applies or skips them.

    Args:
      hook: a `tf.estimator.NanTensorHook`, which by itself would end the training after skipped steps, too.
    Raises:
      NanLossDuringTrainingError: (of `tf.estimator`) after such a step.
    Ranks: local.
    """

    def __init__(self, hook: tf.estimator.NanTensorHook):
        self._hook = hook
        self._decision = self._global_step = None

    def begin(self):
        """Finds the tensors that tell whether the step is skipped, if there are such tensors."""
        self._decision = latest_decision(tf.compat.v1.get_default_graph())
        self._loss = 0.0  # NaN if a loss since the last decision was NaN
        self._global_step = global_step_of()

    def before_run(self, run_context):
        """Fetches the loss, and whether the step is skipped."""
        return tf.estimator.SessionRunArgs([self._decision, self._hook.before_run(run_context).fetches])

    def after_run(self, run_context, run_values):
        """Checks the losses of an update that was not skipped."""
        decision, loss = run_values.results
        skipped, *is_due = decision or (False,)
        self._loss = self._loss if np.isnan(self._loss) else loss
        if not all(is_due):
            return
        loss, self._loss = self._loss, 0.0
        try:
            if not skipped:
                self._hook.after_run(run_context, run_values._replace(results=loss))
        except tf.estimator.NanLossDuringTrainingError:
            step = run_context.session.run(self._global_step) if self._global_step is not None else 0
            raise LossIsNanError(int(step)) from None


def _list_rank_local_ops(run) -> tuple:
    """Returns the operators of a run that need nothing from other ranks."""
    fed = {tensor.op for tensor in run.fed}
    local = dict.fromkeys(fed)
    for op in run.ops:
        is_here = all(other in local or other.type in BACK_EDGES for other in needed_ops(op))
        if is_here and not op.type.startswith(_TRANSFERS):
            local[op] = None
    return tuple(op for op in local if op not in fed)


def _worst_nonfinite_value(minus_inf_count, inf_count, nan_count):
    return np.nan if nan_count else np.inf if inf_count or minus_inf_count else 0.0


def _describe_loss(loss):
    if loss is None:
        return ""
    return "The loss is finite, but its gradients are not. " if np.isfinite(loss) else f"The loss itself is {loss:g}. "
