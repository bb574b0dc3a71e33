"""Compares one optimizer between ranks: collectives before the first step, variables before the first update."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Callable

from npu_bridge import collective
from npu_bridge.base import environment
from npu_bridge.base.own_tensorflow import tf
from npu_bridge.base.tf_internals.callers import is_building_evaluation
from npu_bridge.collective import wire_names
from npu_bridge.collective.checks import agreement, exchanges
from npu_bridge.gradients.checkpoints.saved_state import SavedState
from npu_bridge.gradients.first_step import training_apart
from npu_bridge.gradients.first_step.planned_collectives import plan_collectives
from npu_bridge.gradients.first_step.start_values import (
    comparable_variables,
    compare_variables,
    compare_variables_before_first_run,
)
from npu_bridge.gradients.graph_mode import is_building_graph
from npu_bridge.gradients.stage import ExchangingStage, Stage
from npu_bridge.gradients.step import Step
from npu_bridge.graph.variables import global_step_of


class Comparison:
    """The comparisons of one optimizer between ranks. Without a stage that exchanges, warns of ranks that train apart.

    Args:
      stages: the stages of the pipeline in their order.
      saved: the variables of the optimizer and its stages.
      transfers: the label of the pipeline's collectives; also an attribute.
    Attributes:
      owner: name of the optimizer, for messages; "" before collectives are compared, and if there are none.
      has_compared: whether collectives were compared.
    """

    def __init__(self, stages: Sequence[Stage], saved: SavedState, transfers: wire_names.CollectivesOwner):
        self.owner = ""
        self.has_compared = False
        self.transfers = transfers
        self._stages = stages
        self._saved = saved
        self._compared: set = set()
        self._have_slots: set = set()
        self._is_quiet = False
        self._exchanges_before: exchanges.Exchanges | None = None
        if not any(isinstance(stage, ExchangingStage) for stage in stages):
            training_apart.check_training_of_sessions()
            self._exchanges_before = exchanges.count_exchanges()

    def compare_planned_collectives(self, grads_and_vars: Sequence) -> None:
        """Compares between ranks the gradients that the stages are about to all-reduce.

        Raises:
          RanksDisagreeError: another rank is about to reduce other gradients.
        """
        # In a graph, plans are compared whenever gradients are computed. Functions and eager steps are compared only
        # the first time, because some ranks trace functions, or run eager steps, more often than others.
        is_graph = is_building_graph()
        if self.has_compared and not is_graph:
            return
        self.has_compared = True
        ranks = collective.current()
        plan = plan_collectives(self._stages if ranks.size > 1 else (), grads_and_vars, has_numbered_names=not is_graph)
        self.owner = plan.owner
        if plan.owner:
            agreement.agreements_of_process().check(
                plan, ranks.rank, ranks.size, training=wire_names.current_collectives_label()
            )

    def compare_before_first_run(self, step: Step, transfers: Iterable[str] = ()) -> None:
        """Makes sessions compare the variables of a TF 1 graph between ranks, before the first run of `transfers`.

        Args:
          step: the step of the graph.
          transfers: full names of collectives.
        """
        if not self.owner or not is_building_graph():
            return
        graph, step_counter = tf.compat.v1.get_default_graph(), global_step_of()
        known = [*step.variables_with_gradient, *([] if step_counter is None else [step_counter])]

        def variables():
            with graph.as_default():  # sessions can run outside the block of their graph
                own = [each for each in self._saved.equal_variables() if getattr(each, "graph", None) is graph]
            return [*known, *own]

        compare_variables_before_first_run(self.owner, variables, transfers, self._saved.variables_of_this_rank)

    def warn_of_update_without_exchange(self, step: Step) -> None:
        """Warns on several ranks if this update uses gradients that no collective has averaged."""
        if self._exchanges_before is not None:
            exchanges.warn_of_update_without_exchange(
                self._exchanges_before, [variable for _, variable in step.grads_and_vars]
            )

    def silence_start_warning(self) -> None:
        """Turns off the warning of `compare_start_values`, because the script broadcasts variables."""
        self._is_quiet = True

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
        references = {variable.ref() for variable in trained if self.owner}
        if not (self._have_slots >= references if self.owner else self._saved.has_reported_restore):
            make_slots()
            self._have_slots |= references
        if self.owner and not environment.is_flag_on("HOROVOD_ELASTIC") and not is_building_evaluation():
            new = self._not_compared([*trained, *self._saved.equal_variables()])
            if new:
                kept = self._not_compared(self._saved.variables_of_this_rank())
                self._compared.update(variable.ref() for variable in [*new, *kept])
                compare_variables(self.owner, new, kept, self._is_quiet)
        self._saved.report_and_restore()

    def _not_compared(self, variables):
        return [variable for variable in comparable_variables(variables) if variable.ref() not in self._compared]
