"""Runs a list of stages around a backward pass and an update."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Callable

import tensorflow as tf

from npu_bridge import collective
from npu_bridge.collective import agreement, wire_names
from npu_bridge.gradients.graph_mode import building_graph
from npu_bridge.gradients.stage import Stage, Step
from npu_bridge.gradients.start_values import SeenVariables, watch_graph


class Pipeline:
    """The stages of one optimizer, in the order a gradient meets them.

    One pipeline serves every way to train: TF 1 graphs through `PipelineOptimizer`, and a Keras `train_step` or any
    `tf.function` loop directly.

    Args:
      stages: the stages; at most one of them communicates.
    Attributes:
      optimizer_variables: gives the variables of the optimizer that updates; whoever puts the pipeline around one sets
        it, so that ranks compare these too before the first step.
    Raises:
      ValueError: more than one stage communicates.
    Example:
      >>> step = pipeline.begin()
      >>> with tf.GradientTape() as tape:
      ...     loss = pipeline.scale(loss_of(model, batch), step)
      >>> gradients = tape.gradient(loss, model.trainable_variables)
      >>> grads_and_vars = pipeline.combine(step, zip(gradients, model.trainable_variables))
      >>> pipeline.apply(step, lambda: optimizer.apply_gradients(grads_and_vars))
    """

    def __init__(self, stages: Sequence[Stage]):
        self._stages = tuple(stages)
        self._has_compared = False
        self._owner = ""
        self._seen = SeenVariables()
        self.optimizer_variables: Callable[[], Sequence] = list
        communicating = [type(stage).__name__ for stage in self._stages if stage.communicates]
        if len(communicating) > 1:
            raise ValueError(
                f"Pipeline: gradients would be reduced more than once. Expected at most one stage that communicates; "
                f"got {', '.join(communicating)}. Keep one of them."
            )

    @property
    def scales_loss(self) -> bool:
        """True when a stage changes the loss before it is differentiated."""
        return any(stage.scales_loss for stage in self._stages)

    @property
    def communicates(self) -> bool:
        """True when a stage exchanges gradients between ranks."""
        return any(stage.communicates for stage in self._stages)

    @property
    def only_communicates(self) -> bool:
        """True when there is nothing but the one stage that exchanges gradients."""
        return self.communicates and len(self._stages) == 1

    def decide_together(self) -> None:
        """Makes decisions of this rank alone those of all ranks."""
        for stage in self._stages:
            stage.decide_together()

    def state(self) -> dict:
        """What belongs into an object-based checkpoint, by name."""
        return {name: value for stage in self._stages for name, value in stage.state().items()}

    def begin(self) -> Step:
        """Starts a step; call it once per step, before `scale`."""
        step = Step()
        for stage in self._stages:
            stage.begin(step)
        return step

    def scale(self, loss: tf.Tensor, step: Step) -> tf.Tensor:
        """The loss to differentiate instead of `loss`."""
        for stage in self._stages:
            loss = stage.scale(loss, step)
        return loss

    def combine(self, step: Step, grads_and_vars: Sequence) -> list:
        """Takes this rank's gradients of the scaled loss to the gradients of the job, in true units.

        Args:
          step: the step that `begin` returned.
          grads_and_vars: pairs of (gradient or None, variable).
        Returns:
          List of pairs in the same order; a None stays None, a sparse gradient stays sparse.
        Raises:
          RanksDisagreeError: another rank is about to reduce something else.
        Ranks: collective when a stage communicates.
        """
        step.grads_and_vars = list(grads_and_vars)
        self._compare_with_other_ranks(step)
        with wire_names.noted() as transfers:
            for hook in ("local", "reduce", "reduced"):
                for stage in self._stages:
                    getattr(stage, hook)(step)
        self._watch_graph(step, transfers)
        step.delivered = [grad for grad, _ in step.grads_and_vars]
        return list(step.grads_and_vars)

    def _compare_with_other_ranks(self, step):
        # In graphs, whenever gradients are computed. Functions are traced, and eager steps made, more often on some
        # ranks than on others: then only the first time counts.
        is_graph = building_graph()
        if self._has_compared and not is_graph:
            return
        self._has_compared = True
        plan = agreement.Plan(has_numbered_names=not is_graph)
        for stage in self._stages:
            stage.describe(step, plan)
        self._owner = plan.owner
        if plan.owner:
            ranks = collective.current()
            agreement.of_this_process().check(plan, ranks.rank, ranks.size)

    def apply(self, step: Step, apply: Callable[[], Any]) -> Any:
        """Runs the update, or does not, as the stages decide; then moves their state on.

        Args:
          step: the step, its `grads_and_vars` being what the update will use (clipped, say).
          apply: makes the update; called once while the graph is built.
        Returns:
          What `apply` returned when no stage gates it; else the op that runs all of it, None when executed eagerly.
        """
        self._watch_graph(step, ())
        self.start_alike(step)
        for stage in reversed(self._stages):
            apply = _gated(stage, step, apply)
        update = apply()
        state_updates = [op for op in (stage.after(step) for stage in self._stages) if op is not None]
        if update is None or not state_updates or tf.executing_eagerly():
            return update
        return tf.group(update, *state_updates)

    def start_alike(self, step: Step) -> None:
        """Gives all ranks the same values before the first update, where functions are traced or eager steps made.

        `apply` calls it; whoever only combines gradients calls it before the update.

        Args:
          step: the step, its variables known.
        Ranks: collective, if these variables were not compared before.
        """
        if self._owner and not building_graph():
            trained = [variable for grad, variable in step.grads_and_vars if grad is not None]
            step.make_slots()
            self._seen.compare(self._owner, [*trained, *self._own_variables()])

    def _watch_graph(self, step, transfers):
        """The same in a TF 1 graph: a session compares before it first runs these transfers."""
        if self._owner and building_graph():
            step_counter = tf.compat.v1.train.get_global_step()
            known = [variable for grad, variable in step.grads_and_vars if grad is not None]
            known += [] if step_counter is None else [step_counter]
            watch_graph(self._owner, lambda: [*known, *self._own_variables()], transfers)

    def _own_variables(self):
        return [*self.optimizer_variables(), *variables_of(self.state())]


def _gated(stage, step, apply):
    return lambda: stage.gate(step, apply)


def variables_of(state: dict) -> list:
    """The variables in what `Pipeline.state` gives: loss scale, its counters, skipped steps."""
    return [var for part in state.values() for var in (part.variables if isinstance(part, tf.Module) else [part])]
