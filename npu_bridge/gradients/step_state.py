"""Updates the state of stages after an update of variables: once for all parts in which a step is applied."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Any

from npu_bridge.base.own_tensorflow import tf
from npu_bridge.gradients.graph_mode import current_context, current_graph
from npu_bridge.gradients.stage import ReducingStage, ScalingStage, SelectingStage, Stage, SummingStage
from npu_bridge.gradients.step import Step

# Key of a step's notes: the updates that all parts share, each with its losses, graph and TF 1 context.
_SHARED = object()


def share_state_updates(step: Step) -> None:
    """Lets all copies of a step share the updates of state that are made first."""
    step.notes[_SHARED] = []


def update_states(stages: Sequence[Stage], step: Step, after: Sequence, results: Sequence) -> list[Any]:
    """Calls `after_update` of the stages; returns the ops that they made.

    Args:
      stages: the stages.
      step: the step; its gradients can be all of `Step.delivered` or a part of them.
      after: operators for which all updates of state wait.
      results: the results of the update; stages that are not needed early wait for them.
    """
    place, of_step = [step.losses, current_graph(), current_context()], step.notes.get(_SHARED, [])
    shared = next((ops for made_in, ops in of_step if all(map(operator.is_, made_in, place))), None)
    early, late = shared or [], []
    for stage in stages:
        # The next step of a loop can begin before the update of the last fragment. So stages whose state the next step
        # needs first do not wait for the update in a graph: they read no trained variables.
        is_early = isinstance(stage, (ScalingStage, SelectingStage, SummingStage, ReducingStage))
        if is_early and shared is not None:
            continue
        with tf.control_dependencies([*after, *([] if is_early or tf.executing_eagerly() else results)]):
            made = stage.after_update(step)
        if made is not None:
            (early if is_early else late).append(made)
    if shared is None:
        of_step.append((place, early))
    return early + late
