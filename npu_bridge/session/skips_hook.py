"""A hook that warns when the runs of a session skip step after step."""

from __future__ import annotations

import tensorflow as tf

from npu_bridge.gradients.collections import LOSS_SCALE, STEP_SKIPPED
from npu_bridge.gradients.skips_in_a_row import SkipsInARow
from npu_bridge.graph.run import run_of


class SkipsHook(tf.estimator.SessionRunHook):
    """Looks whether a step was skipped, at runs that decide it anyway; see `warn_of_skips`.

    Graph: reads collections, adds nothing.
    Ranks: local; rank 0 warns.
    """

    def __init__(self):
        self._skips = SkipsInARow()

    def before_run(self, run_context):
        graph, asked = run_context.session.graph, run_context.original_args
        names = [name for name in (STEP_SKIPPED, LOSS_SCALE) if graph.get_collection_ref(name)]
        latest = [graph.get_collection_ref(name)[-1] for name in names]
        if not latest:
            return None
        # What says that a step is skipped may be no part of the step, but the opposite of what is.
        decided = {latest[0].name}, {tensor.name for tensor in latest[0].op.inputs} or {None}
        values = run_of(graph, asked.fetches, asked.feed_dict).values
        if not any(names <= values for names in decided):
            return None
        return tf.estimator.SessionRunArgs(latest)

    def after_run(self, run_context, run_values):
        if run_values.results:
            skipped, *scale = run_values.results
            self._skips.add(bool(skipped), float(scale[0]) if scale else None)
