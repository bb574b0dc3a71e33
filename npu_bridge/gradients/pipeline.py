"""Calls the stages (gradient transformations) of an optimizer in order, between backward pass and update."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any, Callable

from npu_bridge import collective
from npu_bridge.base.own_tensorflow import tf
from npu_bridge.collective import exchanges, wire_names
from npu_bridge.gradients import collections
from npu_bridge.gradients.checkpoints import object_restores
from npu_bridge.gradients.checkpoints.rank_values import RankValues, RestoreOwnValues, gather_and_restore
from npu_bridge.gradients.checkpoints.resuming import watch_savers
from npu_bridge.gradients.first_step import training_apart
from npu_bridge.gradients.first_step.start_values import RankComparison, compare_before_first_run
from npu_bridge.gradients.graph_mode import building_graph, choose_tensors, tensors_if
from npu_bridge.gradients.inner import InnerOptimizer
from npu_bridge.gradients.order import sort_stages
from npu_bridge.gradients.stage import Stage, Step, Update, called_too_early_error, changes_after_verdict
from npu_bridge.gradients.stages.overflow import OverflowCheck
from npu_bridge.gradients.step_branches import BranchResults, make_update
from npu_bridge.graph.variables import global_step_of

# Key of a step's notes: operators that must run before the state of stages is read or changed.
_OPS_TO_AWAIT = "awaited"


def _label_collectives(method):
    """Decorates a method so that its collectives get the label of the pipeline."""

    @functools.wraps(method)
    def named(self, *arguments, **keywords):
        with self.transfers.collectives_belong_here():
            return method(self, *arguments, **keywords)

    return named


class Pipeline:
    """The stages of one optimizer, called in the order of `stage.PLACES`.

    A pipeline serves TF 1 graphs through `PipelineOptimizer`, and a Keras `train_step` or any `tf.function` loop
    directly.

    Args:
      stages: the stages, in any order; at most one of them communicates.
      inner: the optimizer that updates; also an attribute. Before the first step, ranks compare the variables and slots
        of `inner` and the variables of the stages; without `inner`, only the variables of the stages.
      owner: name of the optimizer's class, for messages.
    Attributes:
      stages: the stages in their order.
      transfers: the label that distinguishes the collectives of this pipeline from those of other optimizers.
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
      >>> pipeline.apply(step, optimizer.apply_gradients)
    """

    def __init__(self, stages: Sequence[Stage], inner: InnerOptimizer | None = None, owner: str = "Pipeline"):
        self.inner = inner
        self.stages = sort_stages(stages, owner)
        for stage in self.stages:
            stage.pipeline = self.stages
        self.transfers = wire_names.Owner(is_counted=self.communicates)
        self._comparison = RankComparison()
        self._exchanges_before = exchanges.Exchanges()
        if not self.communicates:
            training_apart.watch_sessions()
            self._exchanges_before = exchanges.count_exchanges()
        self._has_reported_restore = False
        self._is_start_warning_off = False
        kept = [stage for stage in self.stages if not stage.restarts_at_zero]
        has_own = any(type(stage).variables_of_this_rank is not Stage.variables_of_this_rank for stage in kept)
        self._rank_values = RankValues() if has_own else None
        self._replicas = RankValues() if any(stage.differ_between_ranks for stage in self.stages) else None
        self._restore_own: RestoreOwnValues | None = None

    @property
    def scales_loss(self) -> bool:
        """Whether a stage scales the loss before the backward pass."""
        return any(stage.scales_loss for stage in self.stages)

    @property
    def scales_gradients(self) -> bool:
        """Whether gradients are multiplied by a loss scale, either of the loss or of groups of variables."""
        return bool(self.loss_scale_managers)

    @property
    def communicates(self) -> bool:
        """Whether a stage exchanges values between ranks."""
        return any(stage.communicates for stage in self.stages)

    @property
    def loss_scale_managers(self) -> tuple:
        """The managers of the loss scales, in the order of `loss_id`; empty without loss scaling."""
        return tuple(manager for stage in self.stages for manager in getattr(stage, "managers", ()))

    @property
    def needs_true_units(self) -> bool:
        """Whether a stage needs gradients of the unscaled loss."""
        places = ("freeze", "accumulate", "local clip", "synchronise")
        return any(
            stage.needs_true_units or stage.place in places or changes_after_verdict(stage) for stage in self.stages
        )

    @property
    def can_skip_updates(self) -> bool:
        """Whether a stage can skip updates."""
        return any(type(stage).gate is not Stage.gate for stage in self.stages)

    @property
    def only_communicates(self) -> bool:
        """Whether the pipeline has a single stage, which exchanges gradients."""
        return self.communicates and len(self.stages) == 1

    def skip_steps_together(self) -> None:
        """Makes all ranks decide together whether to skip a step, instead of each rank alone."""
        for stage in self.stages:
            if isinstance(stage, OverflowCheck):
                stage.is_joint = True

    def state(self) -> dict:
        """Returns the state to save in an object-based checkpoint, by name."""
        state = {name: value for stage in self.stages for name, value in stage.state().items()}
        if self._rank_values is not None:
            state["of_ranks"] = self._rank_values.module
        if self._replicas is not None:
            state["replicas_of_ranks"] = self._replicas.module
        return state

    @property
    def variables(self) -> list:
        """The variables in the state that `state` returns for checkpoints."""
        return variables_of(self.state())

    def create_variables(self, variables: Sequence, gradients: Sequence | None = None) -> None:
        """Creates the state of the stages for trained variables; arguments as in `Stage.create_variables`."""
        for stage in self.stages:
            stage.create_variables(variables, gradients)
        if self._rank_values is not None:
            kept = [stage for stage in self.stages if not stage.restarts_at_zero]
            self._rank_values.create_rows([variable for stage in kept for variable in stage.variables_of_this_rank()])
        if gradients is None:
            self._make_replicas(variables, list)

    # AutoGraph would convert this package when a user's tf.function calls it: slowly, to no effect.
    @tf.autograph.experimental.do_not_convert
    def begin(self) -> Step:
        """Begins and returns a step. Call this method once per step, before `scale`."""
        if self._replicas is not None and not building_graph():
            self._replicas.take_own_rows()  # before the loss is computed from the weights; graphs: `RestoreOwnValues`
        return Step()

    @tf.autograph.experimental.do_not_convert
    def scale(self, loss: tf.Tensor, step: Step, loss_id: int = 0) -> tf.Tensor:
        """Returns the scaled loss, to be differentiated in place of `loss`.

        Args:
          loss: the loss as the user computed it.
          step: the step that `begin` returned.
          loss_id: position of the loss-scale manager of this loss.
        """
        step.losses.latest = loss_id
        step.losses.values.append(loss)
        for stage in self.stages:
            loss = stage.scale_loss(loss, step)
        step.losses.scaled.append(loss)
        return loss

    @tf.autograph.experimental.do_not_convert
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
        step.losses.scaled.append(loss)
        return [grad for grad, _ in self.own_gradients(step, zip(tape.gradient(loss, variables), variables))]

    def own_gradients(self, step: Step, grads_and_vars: Sequence) -> list:
        """Prepares gradients for `combine` right after the backward pass, before other code uses them.

        Returns:
          List of (gradient, variable) in the order of `grads_and_vars`.
        """
        step.grads_and_vars = list(grads_and_vars)
        step.losses.is_backward_by_optimizer = True
        for stage in self.stages:
            if stage.leaves_out:
                stage.each_batch(step)
        return list(step.grads_and_vars)

    @tf.autograph.experimental.do_not_convert
    @_label_collectives
    def combine(self, step: Step, grads_and_vars: Sequence) -> list:
        """Converts this rank's gradients of the scaled loss to unscaled gradients, averaged over the ranks.

        Args:
          step: the step that `begin` returned.
          grads_and_vars: pairs of (gradient or None, variable).
        Returns:
          List of pairs in the same order. None stays None, and a sparse gradient stays sparse.
        Raises:
          RanksDisagreeError: another rank is about to reduce other gradients.
        Ranks: collective if a stage communicates.
        """
        step.grads_and_vars = list(grads_and_vars)
        self._comparison.compare_plans(self.stages, step.grads_and_vars)
        with wire_names.recorded_names() as transfers:
            self._prepare(step)
            with tf.control_dependencies(step.notes[_OPS_TO_AWAIT]):
                for stage in self.stages:
                    stage.each_batch(step)
                self._reduce_if_due(step)
        self._compare_before_first_run(step, transfers)
        step.delivered = [grad for grad, _ in step.grads_and_vars]
        return list(step.grads_and_vars)

    def _prepare(self, step):
        """Creates the state of stages, and makes later operators wait until this rank has restored its values."""
        trained = [pair for pair in step.grads_and_vars if pair[0] is not None]
        self.create_variables([variable for _, variable in trained], [grad for grad, _ in trained])
        taken = None if self._rank_values is None else self._rank_values.take_own_rows()
        step.notes[_OPS_TO_AWAIT] = [] if taken is None or tf.executing_eagerly() else [taken]

    def _reduce(self, step):
        for stage in self.stages:
            stage.before_reduce(step)
        for stage in self.stages:
            stage.all_reduce(step)
        for stage in self.stages:
            stage.after_reduce(step)

    def _reduce_if_due(self, step):
        """Reduces gradients only if the step is due; else dense gradients become zeros, sparse ones lose their rows."""
        if step.is_due is None or not step.gradients:
            self._reduce_group(step)
            return
        results = BranchResults(step)

        def reduce():
            inside = dataclasses.replace(step, notes=dict(step.notes))
            self._reduce_group(inside)
            return results.of(inside)

        results.unpack(step, tensors_if(step.is_due, reduce, results.nothing))

    def _reduce_group(self, step):
        """Reduces the gradients of the variables that this step trains; other gradients become zeros."""
        if step.group is None or not step.gradients:
            self._reduce(step)
            return
        results = BranchResults(step)

        def reduce(number):
            trained = [(grad if step.group.trains(var, number) else None, var) for grad, var in step.grads_and_vars]
            inside = dataclasses.replace(step, grads_and_vars=trained, group=None, notes=dict(step.notes))
            self._reduce(inside)
            return results.of(inside)

        branches = [functools.partial(reduce, number) for number in range(len(step.group.frozen))]
        results.unpack(step, choose_tensors(step.group.number, branches))

    @tf.autograph.experimental.do_not_convert
    @_label_collectives
    def apply(self, step: Step, apply: Callable[[], Any]) -> Any:
        """Runs the update unless a stage skips it, then updates the state of the stages.

        Args:
          step: the step, whose `grads_and_vars` are the gradients to apply, for example clipped.
          apply: function that makes the update, with a list of (gradient, variable) as argument or without arguments.
            It is called once while the graph is built, or once for each group of variables that a stage trains in turn.
        Returns:
          The result of `apply` if no stage can skip the update. Else the op of the update, or None in eager execution.
        """
        if building_graph():
            watch_savers()
        self._compare_before_first_run(step, ())
        if not self.communicates:
            exchanges.check_update(self._exchanges_before, [variable for _, variable in step.grads_and_vars])
        slots = list if self.inner is None else functools.partial(self.inner.make_slots, step.updated)
        self._make_replicas(step.updated, slots)
        self.compare_start_values(step.grads_and_vars, slots)
        update_of = Update(collections.record_update_operators()(make_update(step, apply)), step.updated, slots)
        for stage in reversed(self.stages):
            update_of = dataclasses.replace(update_of, run=functools.partial(stage.gate, step, update_of))
        with wire_names.recorded_names() as transfers, exchanges.unchecked_updates():
            update = update_of()
        self._restore_own_replicas(set(transfers))
        collections.publish(collections.PIPELINES, self)
        with tf.control_dependencies(step.notes.get(_OPS_TO_AWAIT, [])):
            state_updates = [op for op in (stage.after_update(step) for stage in self.stages) if op is not None]
        if update is None or not state_updates or tf.executing_eagerly():
            return update
        return tf.group(update, *state_updates)

    def silence_start_warning(self) -> None:
        """Turns off the warning of `compare_start_values`, because the script broadcasts variables."""
        self._is_start_warning_off = True

    @_label_collectives
    def compare_start_values(self, grads_and_vars: Sequence, make_slots: Callable[[], list]) -> None:
        """Compares the variables of all ranks before the first update, in functions and eager execution.

        `apply` calls this method. Code that updates without `apply` must call it before the update.

        Args:
          grads_and_vars: (gradient, variable) pairs of the update.
          make_slots: function that creates missing slots of these variables and returns all of them.
        Ranks: collective at the first call for these variables.
        """
        if building_graph():
            return
        if self._comparison.owner:
            trained = [variable for grad, variable in grads_and_vars if grad is not None]
            make_slots()
            variables = [*trained, *self._own_variables()]
            self._comparison.compare_variables(variables, self.variables_of_this_rank(), self._is_start_warning_off)
        if not self._has_reported_restore:
            self._has_reported_restore = True
            make_slots()
            with tf.init_scope():
                optimizer = None if self.inner is None else self.inner.saved_as
                own = [each for each in (self._rank_values, self._replicas) if each is not None]
                object_restores.log_restore_differences(self.state(), self.optimizer_variables(), optimizer, own)
        if self._replicas is not None:
            with tf.init_scope():
                self._replicas.take_own_rows()

    @_label_collectives
    def gather_rank_values(self) -> Any:
        """Gathers on rank 0 the values that differ between ranks, so that a checkpoint of rank 0 contains all of them.

        Returns:
          The op to run in a graph; None in eager execution.
        Raises:
          ValueError: no step has gone through this pipeline yet.
        Ranks: collective.
        """
        if not self._comparison.has_compared:
            raise called_too_early_error("sync_all")
        owner = self._comparison.owner
        gathered = [] if self._rank_values is None else [self._rank_values.gather(f"{owner}_of_ranks")]
        if self._replicas is not None:
            gathered.append(gather_and_restore(self._replicas, f"{owner}_replicas_of_ranks", self._restore_own))
        return None if tf.executing_eagerly() else tf.group(*gathered)

    @property
    def has_rank_values(self) -> bool:
        """Whether a stage has values that differ between ranks."""
        return self._rank_values is not None or self._replicas is not None

    def has_restored_own_weights(self, session: Any) -> bool:
        """Returns whether a session has restored this rank's weights since `sync_all` averaged the weights."""
        return self._restore_own is not None and session in self._restore_own.done_in

    def _make_replicas(self, variables, slots):
        """Creates variables that hold the values of all ranks, for weights and slots that differ between ranks."""
        if self._replicas is not None and collective.current().size > 1:
            differing = {what for stage in self.stages for what in stage.differ_between_ranks}
            own = [*(variables if "variables" in differing else []), *(slots() if "slots" in differing else [])]
            self._replicas.create_rows([variable for variable in own if variable.shape.is_fully_defined()])

    def _restore_own_replicas(self, transfers):
        """Makes each step start from this rank's own values, even after a save or restore of all ranks' values."""
        if self._replicas is not None and self._replicas.kept and building_graph():
            self._restore_own = RestoreOwnValues(self._replicas, transfers)

    def _compare_before_first_run(self, step, transfers):
        """Makes a session compare the variables of all ranks before the first run of the collectives in `transfers`."""
        owner = self._comparison.owner
        if owner and building_graph():
            step_counter = global_step_of()
            known = [*step.updated, *([] if step_counter is None else [step_counter])]
            compare_before_first_run(
                owner, lambda: [*known, *self._own_variables()], transfers, self.variables_of_this_rank
            )

    def variables_of_this_rank(self) -> list:
        """Returns the variables of stages that differ between ranks, such as the sums of `Accumulate`."""
        return [variable for stage in self.stages for variable in stage.variables_of_this_rank()]

    def optimizer_variables(self) -> list:
        """Returns the variables of the inner optimizer."""
        return [] if self.inner is None else self.inner.variables()

    def _own_variables(self):
        of_this_rank = {id(variable) for variable in self.variables_of_this_rank()}
        shared = [variable for variable in self.variables if id(variable) not in of_this_rank]
        return [*self.optimizer_variables(), *shared]


def variables_of(state: dict) -> list:
    """Returns the variables in a result of `Pipeline.state`, such as the loss scale, its counters and skipped steps."""
    return [var for part in state.values() for var in (part.variables if isinstance(part, tf.Module) else [part])]
