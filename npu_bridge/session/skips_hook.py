"""A hook that warns if many steps in a row are skipped."""

from __future__ import annotations

import numpy as np
import tensorflow as tf

from npu_bridge.gradients.collections import LOSS_SCALE, STEP_SKIPPED, UNSCALED_LOSS, latest_decision
from npu_bridge.gradients.steps.skips_in_a_row import SkipsInARow
from npu_bridge.graph.operators import producers
from npu_bridge.graph.run import run_of_context

# One more fetch makes TensorFlow prepare the run anew, so the first skips in a row do not fetch the loss.
_SKIPS_BEFORE_LOSS = 5


class SkippedStepsHook(tf.estimator.SessionRunHook):
    """A hook that counts skipped steps with `SkipsInARow`, and warns.

    The hook reads a decision only in a run that computes it anyway.

    Graph: adds nothing; reads collections.
    Ranks: local; only rank 0 warns.
    """

    def __init__(self):
        self._skips = SkipsInARow()
        self._in_a_row = 0

    def before_run(self, run_context):
        graph = run_context.session.graph
        self._skips.graph = graph
        names = [name for name in (STEP_SKIPPED, LOSS_SCALE, UNSCALED_LOSS) if graph.get_collection_ref(name)]
        latest = {name: graph.get_collection_ref(name)[-1] for name in names}
        skipped, loss = latest.get(STEP_SKIPPED), latest.pop(UNSCALED_LOSS, None)
        if skipped is None:
            return None
        # A run may compute the input of this tensor only: the opposite of the decision.
        decided = {skipped.name}, {tensor.name for tensor in skipped.op.inputs} or {None}
        run = run_of_context(run_context)
        if run.op_set.isdisjoint([skipped.op, *producers(skipped.op.inputs)]):
            return None
        values = run.values
        if not any(names <= values for names in decided):
            return None
        if loss is not None and loss.name in values and self._in_a_row >= _SKIPS_BEFORE_LOSS:
            latest[UNSCALED_LOSS] = loss
        latest[STEP_SKIPPED] = latest_decision(graph)
        return tf.estimator.SessionRunArgs(latest)

    def after_run(self, run_context, run_values):
        skipped, *is_due = run_values.results[STEP_SKIPPED] if run_values.results else (False, False)
        if all(is_due):
            scale, loss = (run_values.results.get(name) for name in (LOSS_SCALE, UNSCALED_LOSS))
            self._in_a_row = self._in_a_row + 1 if skipped else 0
            numbers = (None if value is None else float(np.mean(value)) for value in (scale, loss))
            self._skips.count_steps(bool(skipped), *numbers)
