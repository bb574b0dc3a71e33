"""Starts the variables of one optimizer and its stages with equal values on all ranks, and restores values of ranks.

Stages can also have values that differ between ranks by design. Checkpoints of rank 0 hold them as a row for each rank.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator, Sequence
from typing import Any, Callable

from npu_bridge import collective
from npu_bridge.base.errors import message
from npu_bridge.base.own_tensorflow import tf
from npu_bridge.collective import wire_names
from npu_bridge.collective.checks import exchanges
from npu_bridge.gradients.checkpoints import object_restores
from npu_bridge.gradients.checkpoints.rank_values import RankValues, RestoreOwnValues, gather_and_restore
from npu_bridge.gradients.checkpoints.resuming import watch_savers
from npu_bridge.gradients.first_step import training_apart
from npu_bridge.gradients.first_step.start_values import RankComparison, compare_variables_before_first_run
from npu_bridge.gradients.graph_mode import group_in_graph, is_building_graph
from npu_bridge.gradients.inner.interface import InnerOptimizer
from npu_bridge.gradients.order import name_of_stage
from npu_bridge.gradients.stage import (
    ExchangingStage,
    RestartingStage,
    Stage,
    is_hook_overridden,
    synced_too_early_error,
    variables_of,
)
from npu_bridge.gradients.step import Step
from npu_bridge.graph.variables import global_step_of


class RankState:
    """The variables of one optimizer and its stages, which ranks compare, gather and restore.

    Args:
      stages: the stages of the pipeline in their order.
      inner: the optimizer that updates, or None.
      transfers: the label of the pipeline's collectives; also an attribute.
    """

    def __init__(self, stages: Sequence[Stage], inner: InnerOptimizer | None, transfers: wire_names.CollectivesOwner):
        self._stages = stages
        self._inner = inner
        self.transfers = transfers
        self._comparison = RankComparison()
        self._exchanges_before: exchanges.Exchanges | None = None
        exchanging = [stage for stage in stages if isinstance(stage, ExchangingStage)]
        self._differing = {what for stage in exchanging for what in stage.differ_between_ranks}
        if not exchanging:
            training_apart.check_training_of_sessions()
            self._exchanges_before = exchanges.count_exchanges()
        self._has_reported_restore = False
        self._have_slots: set = set()
        self._is_start_warning_off = False
        self._kept = [stage for stage in stages if not isinstance(stage, RestartingStage)]
        has_own = any(is_hook_overridden(type(stage), "variables_of_this_rank") for stage in self._kept)
        self._values = RankValues() if has_own else None
        self._replicas = RankValues() if self._differing else None
        self._restore_own: RestoreOwnValues | None = None

    @property
    def rank_values(self) -> list[RankValues]:
        """The `RankValues` of what differs between ranks: one for stages, one for weights and slots, if they exist."""
        return [values for values in (self._values, self._replicas) if values is not None]

    def checkpoint_parts(self) -> dict:
        """Returns the state of the stages and the rows of all ranks, by name in object-based checkpoints.

        Raises:
          ValueError: two stages give their state the same name, so one of them would not be saved.
        """
        state: dict = {}
        for stage in self._stages:
            for name, value in stage.state().items():
                if name in state:
                    names = ", ".join(name_of_stage(each) for each in self._stages if name in each.state())
                    problem = f"two stages save their state under the name {name!r}"
                    fix = "Give the state of each stage another name."
                    raise ValueError(message("stages", problem, "a name for the state of each stage", names, fix))
                state[name] = value
        if self._values is not None:
            state["of_ranks"] = self._values.module
        if self._replicas is not None:
            state["replicas_of_ranks"] = self._replicas.module
        return state

    def variables_of_this_rank(self) -> list:
        """Returns the variables of stages that differ between ranks, such as the sums of `Accumulate`."""
        return [variable for stage in self._stages for variable in stage.variables_of_this_rank()]

    def optimizer_variables(self) -> list:
        """Returns the variables of the inner optimizer; of a TF 1 optimizer, those in the default graph."""
        return [] if self._inner is None else self._inner.variables()

    def create_variables(self, variables: Sequence, gradients: Sequence | None = None) -> None:
        """Creates the state of the stages for trained variables, and missing rows for what differs between ranks.

        Args:
          variables, gradients: as in `Stage.create_variables`.
        """
        for stage in self._stages:
            stage.create_variables(variables, gradients)
        if self._values is not None:
            self._values.create_row_for_each_rank(
                [variable for stage in self._kept for variable in stage.variables_of_this_rank()]
            )
        if gradients is None:
            self._create_replicas(variables)

    def _create_replicas(self, variables):
        """Creates missing rows for trained variables and slots that differ between ranks, and these slots."""
        # On one rank, savers of TF 1 graphs restore the mean of rows without variables for the rows.
        if self._replicas is not None and (collective.current().size > 1 or not is_building_graph()):
            own = {
                "weights": variables if "variables" in self._differing else [],
                "slots": self._make_slots(variables) if "slots" in self._differing else [],
            }
            for kind, values in own.items():
                known = [variable for variable in values if variable.shape.is_fully_defined()]
                self._replicas.create_row_for_each_rank(known, kind)

    def _make_slots(self, variables):
        """Creates the missing slots of trained variables, and returns all their slots."""
        return [] if self._inner is None else self._inner.make_slots(variables)

    def restore_own_weights(self) -> None:
        """Restores this rank's weights in functions and eager execution, before the loss is computed from them."""
        if self._replicas is not None and not is_building_graph():  # graphs: `RestoreOwnValues`
            self._replicas.restore_from_own_rows()

    @contextlib.contextmanager
    def reducing(self, step: Step) -> Iterator[None]:
        """Compares between ranks what a block will reduce; creates and restores the state of stages before the block.

        Raises:
          RanksDisagreeError: another rank is about to reduce other gradients.
        """
        self._comparison.compare_planned_collectives(self._stages, step.grads_and_vars)
        with wire_names.record_collective_names() as transfers:
            self.create_variables(step.variables_with_gradient, step.gradients)
            restored = None if self._values is None else self._values.restore_from_own_rows()
            step.kept.awaited = [] if restored is None or tf.executing_eagerly() else [restored]
            with tf.control_dependencies(step.kept.awaited):
                yield
        self._compare_before_first_run(step, transfers)

    def _compare_before_first_run(self, step, transfers):
        """Makes a session compare the variables of all ranks before the first run of the collectives in `transfers`."""
        owner = self._comparison.owner
        if owner and is_building_graph():
            graph, step_counter = tf.compat.v1.get_default_graph(), global_step_of()
            known = [*step.variables_with_gradient, *([] if step_counter is None else [step_counter])]

            def variables():
                with graph.as_default():  # sessions can run outside the block of their graph
                    own = [each for each in self._equal_variables() if getattr(each, "graph", None) is graph]
                return [*known, *own]

            compare_variables_before_first_run(owner, variables, transfers, self.variables_of_this_rank)

    @contextlib.contextmanager
    def updating(self, step: Step) -> Iterator[Callable[[], list]]:
        """Compares variables before the first update, which the block runs, and creates missing rows.

        If weights or slots differ between ranks by design, sessions then load this rank's own after each save or
        restore, before the next step.

        Yields:
          The function that creates missing slots of the updated variables and returns all of them.
        Raises:
          ValueError: a stage would combine 16-bit weights.
        """
        if is_building_graph():
            watch_savers()
        self._compare_before_first_run(step, ())
        if self._exchanges_before is not None:
            exchanges.warn_of_update_without_exchange(
                self._exchanges_before, [variable for _, variable in step.grads_and_vars]
            )
        self._check_precision(step.variables_with_gradient)
        slots = functools.partial(self._make_slots, step.variables_with_gradient)
        self._create_replicas(step.variables_with_gradient)
        self.compare_start_values(step.grads_and_vars, slots)
        with wire_names.record_collective_names() as transfers, exchanges.disable_update_checks():
            yield slots
        if self._replicas is not None and self._replicas.variables and is_building_graph():
            self._restore_own = self._restore_own or RestoreOwnValues(self._replicas)
            self._restore_own.add_update(transfers)

    def _check_precision(self, variables):
        """Rejects stages that combine weights of 16 bits: they would round the float32 copies of the weights away."""
        if self._replicas is None or self._inner is None or collective.current().size == 1:
            return
        narrow = [variable for variable in variables if self._inner.stand_ins.slot_of(variable) is not None]
        if narrow:
            names = ", ".join(name_of_stage(stage) for stage in self._stages if isinstance(stage, ExchangingStage))
            problem = f"ranks would combine the rounded weights of {narrow[0].name}, and lose small updates"
            fix = "Keep the variables in float32: O2, or master_weights=True."
            raise ValueError(message(names, problem, "float32 variables", narrow[0].dtype.name, fix))

    def silence_start_warning(self) -> None:
        """Turns off the warning of `compare_start_values`, because the script broadcasts variables."""
        self._is_start_warning_off = True

    @wire_names.assign_collectives_to_owner
    def compare_start_values(self, grads_and_vars: Sequence, make_slots: Callable[[], list]) -> None:
        """Compares the variables of all ranks before the first update, in functions and eager execution.

        `Pipeline.apply` calls this method. Code that updates without `apply` must call it before the update.

        Args:
          grads_and_vars: (gradient, variable) pairs of the update.
          make_slots: function that creates missing slots of these variables and returns all of them.
        Ranks: collective at the first call for these variables.
        """
        if is_building_graph():
            return
        trained = [variable for grad, variable in grads_and_vars if grad is not None]
        compares = bool(self._comparison.owner)
        references = {variable.ref() for variable in trained if compares}
        if not (self._have_slots >= references if compares else self._has_reported_restore):
            make_slots()
            self._have_slots |= references
        if compares:
            variables = [*trained, *self._equal_variables()]
            self._comparison.compare_variables(variables, self.variables_of_this_rank(), self._is_start_warning_off)
        if not self._has_reported_restore:
            self._has_reported_restore = True
            with tf.init_scope():
                optimizer = None if self._inner is None else self._inner.saved_as
                object_restores.log_restore_differences(
                    self.checkpoint_parts(), self.optimizer_variables(), optimizer, self.rank_values
                )
        if self._replicas is not None:
            with tf.init_scope():
                self._replicas.restore_from_own_rows()

    @wire_names.assign_collectives_to_owner
    def gather(self) -> Any:
        """Gathers on rank 0 the values that differ between ranks, so that a checkpoint of rank 0 contains all of them.

        Returns:
          The op to run in a graph; None in eager execution.
        Raises:
          ValueError: no step has gone through the pipeline yet.
        Ranks: collective.
        """
        if not self._comparison.has_compared:
            raise synced_too_early_error()
        owner = self._comparison.owner
        gathered = [] if self._values is None else [self._values.gather(f"{owner}_of_ranks")]
        if self._replicas is not None:
            gathered.append(gather_and_restore(self._replicas, f"{owner}_replicas_of_ranks", self._restore_own))
        return group_in_graph(*gathered)

    def has_restored_own_weights(self, session: Any) -> bool:
        """Returns whether a session has restored this rank's weights since `sync_all` averaged the weights."""
        return self._restore_own is not None and session in self._restore_own.done_in

    def _equal_variables(self):
        """Returns the variables of the optimizer and its stages that are equal on all ranks."""
        of_this_rank = {id(variable) for variable in self.variables_of_this_rank()}
        of_stages = variables_of(self.checkpoint_parts())
        return [*self.optimizer_variables(), *(each for each in of_stages if id(each) not in of_this_rank)]
