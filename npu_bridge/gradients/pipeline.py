"""Calls the stages (gradient transformations) of an optimizer in order, between backward pass and update."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import logging
import operator
from collections.abc import Sequence
from typing import Any, Callable, TypeVar

from npu_bridge.base.errors import message, say_once
from npu_bridge.base.own_tensorflow import tf
from npu_bridge.base.tf_internals import keras3
from npu_bridge.collective import wire_names
from npu_bridge.collective.checks.exchanges import disable_update_checks
from npu_bridge.gradients import collections
from npu_bridge.gradients.arithmetic import are_elements_finite, map_values, unscale_in_float32
from npu_bridge.gradients.checkpoints.resuming import watch_savers
from npu_bridge.gradients.checkpoints.saved_state import SavedState
from npu_bridge.gradients.first_step.comparison import Comparison
from npu_bridge.gradients.graph_mode import current_context, current_graph, group_in_graph, is_building_graph
from npu_bridge.gradients.inner.interface import InnerOptimizer
from npu_bridge.gradients.order import name_of_stage, order_for_hook, sort_stages
from npu_bridge.gradients.stage import (
    REDUCED_GRADIENTS,
    DecidingStage,
    ExchangingStage,
    LossStage,
    ReducingStage,
    ScalingStage,
    SelectingStage,
    Stage,
    SummingStage,
    changes_gradients,
    has_role,
    is_hook_overridden,
    synced_too_early_error,
    variables_of,
)
from npu_bridge.gradients.step import Step, StepUpdate, narrow_to_dtypes_of, widen_again
from npu_bridge.gradients.steps.branches import make_update, reduce_trained, run_part_if

_StageType = TypeVar("_StageType", bound=Stage)
# The next step of a loop can begin before the update of the last fragment. So stages whose state the next step needs
# first do not wait for the update in a graph: they read no trained variables.
_UPDATED_EARLY = (ScalingStage, SelectingStage, SummingStage, ReducingStage)


class Pipeline:
    """The stages of one optimizer, called in the order of `stage.PLACES`.

    A pipeline serves TF 1 graphs through `PipelineOptimizer`, and a Keras `train_step` or any `tf.function` loop
    directly.

    Args:
      stages: the stages, in any order; at most one of them communicates.
      inner: the optimizer that updates; also an attribute. Before the first step, ranks compare the variables and slots
        of `inner` and the variables of the stages; without `inner`, only the variables of the stages.
      owner: name of the optimizer's class, for messages.
      combined: a `CombinedGradients`, to divide many gradients at once; None to divide them separately. Also an
        attribute.
    Attributes:
      stages: the stages in their order.
      transfers: the label that distinguishes the collectives of this pipeline from those of other optimizers.
      comparison: the comparisons between ranks before the first step and update.
      saved: the variables that checkpoints hold, with those that differ between ranks.
    Raises:
      TypeError: an element of `stages` is not a stage.
      ValueError: two stages communicate, two stages have the same place, or no other stage gives a guarantee that a
        stage needs.
    Example:
      >>> step = pipeline.begin()
      >>> with tf.GradientTape() as tape:
      ...     loss = pipeline.scale(loss_of(model, batch), step)
      >>> gradients = tape.gradient(loss, model.trainable_variables)
      >>> grads_and_vars = pipeline.combine(step, zip(gradients, model.trainable_variables))
      >>> pipeline.apply(step, grads_and_vars, optimizer.apply_gradients)
    """

    def __init__(
        self,
        stages: Sequence[Stage],
        inner: InnerOptimizer | None = None,
        owner: str = "Pipeline",
        combined: Any = None,
    ):
        self.inner = inner
        self.combined = combined
        self.stages = sort_stages(stages, owner)
        for check in self.stages_of_type(DecidingStage):
            check.stages = self.stages
        self.transfers = wire_names.CollectivesOwner(is_counted=self.communicates)
        self.saved = SavedState(self.stages, inner)
        self.comparison = Comparison(self.stages, self.saved, self.transfers)

    @property
    def scales_loss(self) -> bool:
        """Whether a stage changes the loss before the backward pass."""
        return any(is_hook_overridden(type(stage), "scale_loss") for stage in self.stages)

    @property
    def scales_gradients(self) -> bool:
        """Whether gradients are multiplied by a loss scale, either of the loss or of groups of variables."""
        return bool(self.loss_scale_managers)

    @property
    def communicates(self) -> bool:
        """Whether a stage exchanges gradients or variables between ranks; flags of the overflow check do not count."""
        return bool(self.stages_of_type(ExchangingStage))

    @property
    def reduces_gradients(self) -> bool:
        """Whether a stage combines the gradients of all ranks; False if ranks only synchronise variables."""
        return any(REDUCED_GRADIENTS in stage.gives for stage in self.stages)

    @property
    def loss_scale_managers(self) -> tuple:
        """The managers of the loss scales, in the order of `loss_id`; empty without loss scaling."""
        return tuple(manager for stage in self.stages_of_type(ScalingStage) for manager in stage.managers)

    @property
    def can_skip_updates(self) -> bool:
        """Whether a stage has a gate, which can skip or change updates."""
        return any(is_hook_overridden(type(stage), "gate") for stage in self.stages)

    @property
    def decides_about_steps(self) -> bool:
        """Whether a stage checks gradients, and skips steps with unusable ones."""
        return bool(self.stages_of_type(DecidingStage))

    @property
    def only_communicates(self) -> bool:
        """Whether the pipeline has a single stage, which exchanges gradients."""
        return self.communicates and len(self.stages) == 1

    def skip_steps_together(self) -> None:
        """Makes all ranks decide together whether to skip a step, instead of each rank alone."""
        for check in self.stages_of_type(DecidingStage):
            check.is_joint = True

    def check_scaled_gradients(self) -> None:
        """Also skips the steps that an inner optimizer skips, whose stages check gradients that are still scaled."""
        for check in self.stages_of_type(DecidingStage):
            check.checks_scaled_gradients = True

    def stages_of_type(self, kind: type[_StageType]) -> list[_StageType]:
        """Returns the stages of one class or of classes derived from it."""
        return [stage for stage in self.stages if isinstance(stage, kind)]

    def state(self) -> dict:
        """Returns the state to save in an object-based checkpoint, by name."""
        return self.saved.checkpoint_parts()

    @property
    def variables(self) -> list:
        """The variables in the state that `state` returns for checkpoints."""
        return variables_of(self.state())

    def create_variables(self, variables: Sequence, gradients: Sequence | None = None) -> None:
        """Creates the state of the stages for trained variables; arguments as in `Stage.create_variables`."""
        for stage in self.stages:
            stage.create_variables(variables, gradients)
        self.saved.create_rows_of_stages()
        if gradients is None:
            self.saved.create_rows_of_weights(variables)

    @wire_names.assign_collectives_to_owner
    def gather_own_values(self) -> Any:
        """Gathers on rank 0 the values that differ between ranks, so that a checkpoint of rank 0 contains all of them.

        Returns:
          The op to run in a graph; None in eager execution.
        Raises:
          ValueError: no step has gone through the pipeline yet.
        Ranks: collective.
        """
        if not self.comparison.has_compared:
            raise synced_too_early_error()
        return group_in_graph(*self.saved.gather(self.comparison.owner))

    def warn_of_unscaled_loss(self, owner: str, fix: str) -> None:
        """Warns once if the pipeline scales losses, for gradients that other code has computed."""
        if self.scales_loss:
            text = f"{owner}: the loss was not scaled, because other code computed the gradients. {fix}"
            say_once(logging.WARNING, text)

    def warn_of_missing_changes(self, owner: str) -> None:
        """Warns once of the stages that have not changed gradients, because other code has computed these."""
        names = [name_of_stage(stage) for stage in self.stages if changes_gradients(stage)]
        if names:
            text = f"{owner}: {', '.join(names)} did not change the gradients, because other code computed them."
            say_once(logging.WARNING, f"{text} Call minimize or compute_gradients.")

    def begin(self) -> Step:
        """Begins and returns a step. Call this method once per step, before `scale`."""
        self.saved.restore_weights()
        return Step()

    def scale(self, loss: tf.Tensor, step: Step, loss_id: int = 0) -> tf.Tensor:
        """Returns the scaled loss, to be differentiated in place of `loss`.

        Args:
          loss: the loss as the user computed it.
          step: the step that `begin` returned.
          loss_id: position of the loss-scale manager of this loss.
        """
        step.losses.numbers.append(loss_id)
        step.losses.values.append(loss)
        for stage in order_for_hook(self.stages_of_type(LossStage), "scale_loss"):
            loss = stage.scale_loss(loss, step)
        step.losses.scaled.append(loss)
        return loss

    def gradients(self, step: Step, tape: tf.GradientTape, loss: tf.Tensor, variables: Sequence) -> list:
        """Returns `tape.gradient(loss, variables)`; a `tf.function` computes only gradients that the step needs.

        Args:
          step: the step that `begin` returned.
          tape: the tape that recorded the loss.
          loss: the result of `scale`.
          variables: the variables to differentiate by.
        Returns:
          List of gradients to pass to `combine`; None for a variable without a gradient.
        """
        return [grad for grad, _ in self.prepare_gradients(step, zip(tape.gradient(loss, variables), variables))]

    def prepare_gradients(self, step: Step, grads_and_vars: Sequence) -> list:
        """Prepares gradients for `combine` right after the backward pass, before other code uses them.

        Returns:
          List of (gradient, variable) in the order of `grads_and_vars`.
        """
        step.grads_and_vars = list(grads_and_vars)
        step.losses.is_backward_by_optimizer = True
        self._select_variables(step)
        return list(step.grads_and_vars)

    def _select_variables(self, step):
        for stage in self.stages_of_type(SelectingStage):
            if step.group is None:
                stage.select_variables(step)

    @wire_names.assign_collectives_to_owner
    def combine(self, step: Step, grads_and_vars: Sequence) -> list:
        """Converts this rank's gradients of the scaled loss to unscaled gradients, averaged over the ranks.

        Args:
          step: the step that `begin` returned.
          grads_and_vars: pairs of (gradient or None, variable).
        Returns:
          List of pairs in the same order. None stays None, and a sparse gradient stays sparse.
        Raises:
          RanksDisagreeError: another rank is about to reduce other gradients.
        Ranks: collective if a stage communicates or checks gradients on all ranks.
        """
        step.grads_and_vars = list(grads_and_vars)
        given = [grad for grad, _ in step.grads_and_vars]
        keras3.reject_keras_variables("Pipeline.combine", step.variables_with_gradient)
        self.comparison.compare_planned_collectives(step.grads_and_vars)
        with wire_names.record_collective_names() as transfers:
            self.create_variables(step.variables_with_gradient, step.gradients)
            step.kept.awaited = self.saved.restore_stages()
            with tf.control_dependencies(step.kept.awaited):
                self._select_variables(step)
                for stage in order_for_hook(self.stages, "each_batch"):
                    with self._keep_unusable(stage, "each_batch", step):
                        stage.each_batch(step)
                self._reduce_if_due(step)
        self.comparison.compare_before_first_run(step, transfers)
        step.kept.state_updates = []
        step.kept.in_float32 = narrow_to_dtypes_of(step, given)
        step.delivered = [grad for grad, _ in step.grads_and_vars]
        return list(step.grads_and_vars)

    @contextlib.contextmanager
    def _keep_unusable(self, stage, hook, step):
        """Runs a custom stage's hook, the block. An Inf or NaN from before makes all gradients NaN after it."""
        can_hide = not (has_role(stage) or stage.keeps_usable) and changes_gradients(stage, [hook])
        if not (can_hide and self.decides_about_steps and step.gradients):
            yield
            return
        are_finite = are_elements_finite(step.gradients)
        yield
        step.map(lambda grad: map_values(grad, lambda values: tf.where(are_finite, values, float("nan"))))

    def _reduce(self, step):
        for stage in order_for_hook(self.stages, "before_reduce"):
            with self._keep_unusable(stage, "before_reduce", step):
                stage.before_reduce(step)
        given = [grad for grad, _ in step.grads_and_vars]
        for stage in self.stages_of_type(ReducingStage):
            stage.all_reduce(step)
        self._divide_by_loss_scale(step)
        # Without the loss scale, a gradient can be 0 in 16 bits. Float32 copies of variables get it unrounded.
        if not self._updates_in_float32:
            narrow_to_dtypes_of(step, given)
        summing = [stage for stage in self.stages_of_type(SummingStage) if stage.place == "accumulate reduced"]
        first = self.stages.index(summing[0]) if summing else len(self.stages)
        _run_after_reduce(self.stages[:first], step)
        if summing:
            is_last, check = summing[0].add_reduced(step), step.check
            run_part_if(is_last, step, functools.partial(_run_after_reduce, self.stages[first:]))
            step.check = check  # of every batch

    @property
    def _updates_in_float32(self):
        return self.inner is not None and self.inner.updates_in_float32

    def _divide_by_loss_scale(self, step):
        """Divides the reduced gradients by `Step.divisor`, in float32 for 16 bits; in flat tensors with `combined`."""
        if self.combined is None or step.divisor is None:
            if step.divisor is not None or self._updates_in_float32:
                step.map(lambda grad: unscale_in_float32(grad, step.divisor))
        else:
            self.combined.unscale(step)
        step.mark_as_unscaled()

    def _reduce_if_due(self, step):
        """Reduces the gradients of the variables that the step trains, if the step is due."""
        reduce = self._reduce if step.group is None else functools.partial(reduce_trained, reduce=self._reduce)
        if step.is_due is None:
            reduce(step)
        else:
            run_part_if(step.is_due, step, reduce)

    @wire_names.assign_collectives_to_owner
    def apply(self, step: Step, grads_and_vars: Sequence, update: Callable[[list], Any]) -> Any:
        """Runs the update unless a stage skips it, then updates the state of the stages.

        Args:
          step: the step that `begin` returned.
          grads_and_vars: the pairs to apply: the result of `combine`, whose gradients the caller can clip or change.
          update: function that updates the variables of a list of (gradient, variable), such as `apply_gradients` of an
            optimizer. It is called once while the graph is built, or once for each group of variables that a stage
            trains in turn.
        Returns:
          The result of `update` if no stage can skip the update or has state to update. Else the op of the update, or
          None in eager execution.
        Raises:
          ValueError: the loss of the step was scaled, but its gradients did not go through `combine`.
        """
        if step.divisor is not None:
            problem = "the gradients are still multiplied by the loss scale"
            expected, fix = "the result of combine", "Pass the gradients through pipeline.combine first."
            raise ValueError(message("Pipeline.apply", problem, expected, "gradients of the scaled loss", fix))
        step.grads_and_vars = list(grads_and_vars)
        widen_again(step, step.kept.in_float32)
        trained = step.variables_with_gradient
        make_slots = functools.partial(self.saved.make_slots, trained)
        if is_building_graph():
            watch_savers()
        self.comparison.compare_before_first_run(step)
        self.comparison.warn_of_update_without_exchange(step)
        self.saved.create_rows_of_weights(trained)
        self.comparison.compare_start_values(step.grads_and_vars, make_slots)
        with wire_names.record_collective_names() as transfers, disable_update_checks():
            gated = StepUpdate(make_update(step, update), trained, make_slots)
            for stage in reversed(self.stages):
                gated = dataclasses.replace(gated, run=functools.partial(stage.gate, step, gated))
            updated = gated()
        self.saved.restore_weights_before_runs(transfers)
        collections.publish_in_graph(collections.PIPELINES, self)
        # A function runs all other results by itself, such as the step count that an optimizer of Keras 3 returns.
        results = [
            each for each in tf.nest.flatten(updated) if isinstance(each, (tf.Operation, tf.Tensor, tf.Variable))
        ]
        state_updates = self._update_states(step, results)
        if updated is None or not state_updates or tf.executing_eagerly():
            return updated
        return tf.group(*results, *state_updates)

    def _update_states(self, step, results):
        """Calls `after_update` of the stages; returns the ops they made.

        A step can be applied in parts, each with some of the gradients in `Step.delivered`. All parts share the updates
        of the stages that do not wait for `results`, the results of the update.
        """
        place, of_step = [step.losses, current_graph(), current_context()], step.kept.state_updates
        shared = next((ops for made_in, ops in of_step if all(map(operator.is_, made_in, place))), None)
        early, late = shared or [], []
        for stage in self.stages:
            is_early = isinstance(stage, _UPDATED_EARLY)
            if is_early and shared is not None:
                continue
            awaited = [] if is_early or tf.executing_eagerly() else results
            with tf.control_dependencies([*step.kept.awaited, *awaited]):
                made = stage.after_update(step)
            if made is not None:
                (early if is_early else late).append(made)
        if shared is None:
            of_step.append((place, early))
        return early + late


def _run_after_reduce(stages, step):
    for stage in stages:
        stage.after_reduce(step)
