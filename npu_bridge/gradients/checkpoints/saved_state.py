"""Keeps what checkpoints hold of one optimizer and its stages, with values that differ between ranks by design.

Checkpoints of rank 0 hold such values as a row for each rank.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from npu_bridge import collective
from npu_bridge.base.errors import message
from npu_bridge.base.own_tensorflow import tf
from npu_bridge.gradients.checkpoints import object_restores
from npu_bridge.gradients.checkpoints.rank_values import RankValues, RestoreOwnValues, gather_and_restore
from npu_bridge.gradients.graph_mode import is_building_graph
from npu_bridge.gradients.inner.interface import InnerOptimizer
from npu_bridge.gradients.order import name_of_stage
from npu_bridge.gradients.stage import (
    ExchangingStage,
    RestartingStage,
    Stage,
    is_hook_overridden,
    variables_of,
)


class SavedState:
    """The saved variables of one optimizer and its stages, and the rows for values that differ between ranks.

    Args:
      stages: the stages of the pipeline in their order.
      inner: the optimizer that updates, or None.
    Attributes:
      has_reported_restore: whether differences to a restored checkpoint were looked for and logged.
    """

    def __init__(self, stages: Sequence[Stage], inner: InnerOptimizer | None):
        self.has_reported_restore = False
        self._stages = stages
        self._inner = inner
        exchanging = [stage for stage in stages if isinstance(stage, ExchangingStage)]
        self._differing = {what for stage in exchanging for what in stage.differ_between_ranks}
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

    def optimizer_variables(self) -> list:
        """Returns the variables of the inner optimizer; of a TF 1 optimizer, those in the default graph."""
        return [] if self._inner is None else self._inner.variables()

    def variables_of_this_rank(self) -> list:
        """Returns the variables of stages that differ between ranks, such as the sums of `Accumulate`."""
        return [variable for stage in self._stages for variable in stage.variables_of_this_rank()]

    def equal_variables(self) -> list:
        """Returns the variables of the optimizer and its stages that are equal on all ranks."""
        of_this_rank = {id(variable) for variable in self.variables_of_this_rank()}
        of_stages = variables_of(self.checkpoint_parts())
        return [*self.optimizer_variables(), *(each for each in of_stages if id(each) not in of_this_rank)]

    def make_slots(self, variables: Sequence) -> list:
        """Creates the missing slots of trained variables, and returns all their slots."""
        return [] if self._inner is None else self._inner.make_slots(variables)

    def create_rows_of_stages(self) -> None:
        """Creates missing rows for the variables of stages that differ between ranks."""
        if self._values is not None:
            self._values.create_row_for_each_rank(
                [variable for stage in self._kept for variable in stage.variables_of_this_rank()]
            )

    def create_rows_of_weights(self, variables: Sequence) -> None:
        """Creates missing rows for trained variables and slots that differ between ranks, and these slots.

        Raises:
          ValueError: a stage would combine 16-bit weights.
        """
        if self._replicas is None:
            return
        self._check_precision(variables)
        # On one rank, savers of TF 1 graphs restore the mean of rows without variables for the rows.
        if collective.current().size > 1 or not is_building_graph():
            own = {
                "weights": variables if "variables" in self._differing else [],
                "slots": self.make_slots(variables) if "slots" in self._differing else [],
            }
            for kind, values in own.items():
                known = [variable for variable in values if variable.shape.is_fully_defined()]
                self._replicas.create_row_for_each_rank(known, kind)

    def _check_precision(self, variables):
        """Rejects stages that combine weights of 16 bits: they would round the float32 copies of the weights away."""
        if self._inner is None or collective.current().size == 1:
            return
        narrow = [variable for variable in variables if self._inner.stand_ins.slot_of(variable) is not None]
        if narrow:
            names = ", ".join(name_of_stage(stage) for stage in self._stages if isinstance(stage, ExchangingStage))
            problem = f"ranks would combine the rounded weights of {narrow[0].name}, and lose small updates"
            fix = "Keep the variables in float32: O2, or master_weights=True."
            raise ValueError(message(names, problem, "float32 variables", narrow[0].dtype.name, fix))

    def restore_stages(self) -> list:
        """Restores the values of this rank's stages from their rows; returns the ops for which stages must wait."""
        restored = None if self._values is None else self._values.restore_from_own_rows()
        return [] if restored is None or tf.executing_eagerly() else [restored]

    def restore_weights(self) -> None:
        """Restores this rank's weights in functions and eager execution, before the loss is computed from them."""
        if self._replicas is not None and not is_building_graph():  # graphs: `RestoreOwnValues`
            self._replicas.restore_from_own_rows()

    def restore_weights_before_runs(self, transfers: Iterable[str]) -> None:
        """Makes sessions of a TF 1 graph restore this rank's weights, after each save or restore, before the next step.

        Args:
          transfers: full names of the collectives of the update.
        """
        if self._replicas is not None and self._replicas.variables and is_building_graph():
            self._restore_own = self._restore_own or RestoreOwnValues(self._replicas)
            self._restore_own.add_update(transfers)

    def report_and_restore(self) -> None:
        """Logs once how a restored checkpoint differs from the training, and restores this rank's weights eagerly."""
        if not self.has_reported_restore:
            self.has_reported_restore = True
            with tf.init_scope():
                optimizer = None if self._inner is None else self._inner.saved_as
                object_restores.log_restore_differences(
                    self.checkpoint_parts(), self.optimizer_variables(), optimizer, self.rank_values
                )
        if self._replicas is not None:
            with tf.init_scope():
                self._replicas.restore_from_own_rows()

    def gather(self, owner: str) -> list:
        """Gathers on rank 0 the values that differ between ranks; returns the ops, or Nones in eager execution.

        Args:
          owner: prefix of the names of the collectives.
        Ranks: collective.
        """
        gathered = [] if self._values is None else [self._values.gather(f"{owner}_of_ranks")]
        if self._replicas is not None:
            gathered.append(gather_and_restore(self._replicas, f"{owner}_replicas_of_ranks", self._restore_own))
        return gathered

    def has_restored_weights(self, session: Any) -> bool:
        """Returns whether a session has restored this rank's weights since `sync_all` averaged the weights."""
        return self._restore_own is not None and session in self._restore_own.done_in
