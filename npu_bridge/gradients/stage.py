"""`Stage`, the base class of gradient transformations, and `Step`, one training step's gradients between them."""

from __future__ import annotations

import dataclasses
from typing import Any, Callable

import tensorflow as tf

from npu_bridge.base.errors import KnownKeywords, message
from npu_bridge.base.flat_tensors import mapped
from npu_bridge.collective.agreement import Plan
from npu_bridge.gradients.arithmetic import map_values
from npu_bridge.gradients.graph_mode import run_if, tensors_if


@dataclasses.dataclass
class Step:
    """One training step's gradients, between the backward pass and the update.

    Attributes:
      grads_and_vars: list of (gradient, variable); a gradient is a tensor, `tf.IndexedSlices` or None.
      loss_scale: float32 scalar the loss is multiplied by in this step, or None; with several scales the one that sums
        of gradients have in common.
      scales: the loss scales of all losses, or groups of variables.
      loss_id: position of the scale of the loss that was scaled last.
      unscaled_losses: the losses as the user computed them, in the order in which they were scaled.
      judged: whether the gradients of each loss or group can be used by themselves, by its number: on this rank, and
        as soon as the ranks have agreed on all of them. Empty where the gradients are judged as a whole only.
      delayed: gradients of backward passes that still have the scale of their loss, by its number.
      divisor: what the gradients are still multiplied by, as a Python number or a float32 scalar tensor; dividing by
        it gives them in true units (of the unscaled loss, averaged over the ranks). None when they are in true units.
      on_wire: what this rank sends of each gradient (rows that share an index added up, rounded to 16 bits where
        asked, still multiplied by `divisor`): tensors, `tf.IndexedSlices` or Nones in the order of `grads_and_vars`;
        None when it sends nothing. Local gradients are judged and transferred from here.
      is_usable_here: boolean scalar, this rank's own verdict on what it sends, or None.
      should_apply: boolean scalar, the decision whether this step's update happens, or None while it is open.
      overflow: boolean scalar, whether this step should have updated the variables and does not; None as long as that
        is open, or where nothing can skip a step.
      make_slots: gives the optimizer's slots of the variables to be updated, making those that do not exist yet.
      delivered: the gradients as the pipeline handed them to the caller; what comes back may be clipped.
      losses: what was differentiated, before and after it was scaled.
      group: int32 scalar, which group of variables this step trains; None when it trains all of them.
      frozen: for each group the references of the variables that it does not train; group 0 trains all.
      is_due: boolean scalar, whether this step exchanges and applies what was accumulated; None when every step does.
      is_transformed: True when a stage after the verdict changes gradients.
      needs_recheck: True when one of these does not promise that usable gradients stay usable.
      notes: what a stage keeps for its later hooks, by stage.
      combined: joins gradients into flat tensors, to be unscaled and judged at once; None where each is by itself.
      waits_for: ops of a graph that must have run before what stages keep is read or changed.
      carried: tensors of known shapes that `local`, `reduce` or `reduced` keep for `after`, by a key of the stage's.
    """

    grads_and_vars: list = dataclasses.field(default_factory=list)
    loss_scale: tf.Tensor | None = None
    scales: tuple = ()
    loss_id: int = 0
    unscaled_losses: list = dataclasses.field(default_factory=list)
    judged: dict = dataclasses.field(default_factory=dict)
    delayed: dict = dataclasses.field(default_factory=dict)
    divisor: Any = None
    on_wire: list | None = None
    is_usable_here: tf.Tensor | None = None
    should_apply: tf.Tensor | None = None
    overflow: tf.Tensor | None = None
    make_slots: Callable[[], list] = list
    delivered: list = dataclasses.field(default_factory=list)
    losses: list = dataclasses.field(default_factory=list)
    group: tf.Tensor | None = None
    frozen: tuple = ()
    is_due: tf.Tensor | None = None
    is_transformed: bool = False
    needs_recheck: bool = False
    notes: dict = dataclasses.field(default_factory=dict)
    combined: Any = None
    waits_for: list = dataclasses.field(default_factory=list)
    carried: dict = dataclasses.field(default_factory=dict)

    @property
    def gradients(self) -> list:
        """The gradients that exist, without the Nones."""
        return [grad for grad, _ in self.grads_and_vars if grad is not None]

    def map(self, transform: Callable[[Any], Any]) -> None:
        """Replaces every existing gradient by `transform(gradient)`."""
        self.grads_and_vars = [
            (None if grad is None else transform(grad), variable) for grad, variable in self.grads_and_vars
        ]

    def map_elements(self, transform: Callable[[tf.Tensor], tf.Tensor]) -> None:
        """Replaces the values of every existing gradient by `transform(values)`, which treats each element by itself.

        Gradients that are combined stay so.
        """
        dense = [grad for grad in self.gradients if isinstance(grad, tf.Tensor)]
        made = dict(zip(map(id, dense), mapped(dense, transform)))
        self.map(lambda grad: made[id(grad)] if isinstance(grad, tf.Tensor) else map_values(grad, transform))

    def multiplied_by(self, factor: Any) -> None:
        """Notes that the gradients carry one more factor."""
        self.divisor = factor if self.divisor is None else self.divisor * factor

    def trains(self, variable: Any, group: int) -> bool:
        """True for a variable that a group trains."""
        return not self.frozen or variable.ref() not in self.frozen[group]

    def when_due(self, make: Callable[[], list], otherwise: Callable[[], list]) -> list:
        """The tensors that `make` gives in a step that is due, and those of `otherwise` in any other."""
        return make() if self.is_due is None else tensors_if(self.is_due, make, otherwise)

    def run_when_due(self, run: Callable[[], Any]) -> Any:
        """Runs an update in a step that is due, and nothing in any other; returns the op."""
        return run() if self.is_due is None else run_if(self.is_due, run)

    def is_skipped(self) -> tf.Tensor:
        """True when this step should have updated the variables and does not; the decision must have been taken."""
        is_left_out = tf.logical_not(self.should_apply)
        return is_left_out if self.is_due is None else tf.logical_and(self.is_due, is_left_out)


# Where a stage can stand, in the order in which gradients go through.
PLACES = (
    "scale",  # the loss is multiplied, and the reduced gradients are divided
    "freeze",  # some variables are left out of a step
    "accumulate",  # gradients of several batches are added up on this rank
    "local clip",  # what this rank sends is bounded
    "reduce",  # gradients of all ranks are combined
    "verdict",  # this rank judges what it sends; all ranks decide about the step
    "accumulate reduced",  # from here on: reduced gradients in true units
    "clip by value",
    "clip by norm",
    "centralise",
    "transform",
    "guard",  # old values are kept for an update that fails
    "update",
    "synchronise",  # after the update
    "record",
)


class Stage(KnownKeywords):
    """One gradient transformation. Every hook leaves what it gets unchanged unless a stage overrides it.

    A pipeline calls each hook of all its stages before the next hook, in this order:

        begin ─► scale ─► backward pass ─► computed ─► prepare ─► collect ─► local ─► reduce ─► reduced
          ─► (caller clips) ─► gate ─► update
                                └──► after

    Stages use TensorFlow ops only, so that one stage serves a TF 1 graph, a `tf.function` and eager execution. What a
    stage is made of is set at construction; what belongs to one step is kept in its `Step`.

    The order of stages is that of `PLACES`, whatever the order in which they are given. Two stages at one place say
    which of them comes first.

    Attributes:
      place: one of `PLACES`.
      stands_before: classes of stages, or their names, that must stand after this one.
      stands_after: the same for stages that must stand before this one.
      gives: what other stages can rely on when this one is there.
      needs: what another stage of the pipeline must give.
      keeps_usable: True for a stage that never makes an unusable gradient of usable ones, and never hides one: then
        its results need not be judged again. Only stages after the verdict are asked.
      scales_loss: True for a stage whose `scale` changes the loss.
      communicates: True for a stage that keeps ranks together: by exchanging gradients, or variables after the update.
      needs_variables: True for a stage that must know of which variables gradients are.
      spans_batches: True for a stage that makes one update of several batches.
      leaves_out: True for a stage that leaves variables out of some steps.
      needs_true_units: True for a stage that must not get gradients that another optimizer's loss scale multiplies.
      keeps_replicas: True for a stage that lets trained variables or their slots differ between ranks.
      copes_with_left_out: True for a stage at the update, or after it, that leaves such variables as they are.
    """

    place = "transform"
    stands_before: tuple = ()
    stands_after: tuple = ()
    gives: tuple = ()
    needs: tuple = ()
    keeps_usable = False
    scales_loss = False
    communicates = False
    needs_variables = False
    spans_batches = False
    leaves_out = False
    needs_true_units = False
    keeps_replicas = False
    copes_with_left_out = False

    def get_config(self) -> dict:
        """The arguments of the constructor, for saving with a Keras model; on all ranks they must be the same."""
        return {}

    @classmethod
    def from_config(cls, config: dict) -> Stage:
        """The counterpart of `get_config`."""
        return cls(**config)

    def sent_bytes(self, others: float, ranks: int) -> float | None:
        """What this stage makes of the bytes that a rank sends, for `explain`.

        Args:
          others: bytes of one parameter's gradient that a rank sends for a batch, on average, without this stage.
          ranks: number of ranks, at least 2.
        Returns:
          The same with this stage; None if that depends on gradients or variables.
        """
        return others

    def named(self, name: str) -> None:
        """Tells the stage the prefix of its transfers' names, if it has any; every optimizer has another one."""

    def state(self) -> dict:
        """Objects that hold variables of this stage, by name: what an object-based checkpoint saves."""
        return {}

    def make_variables(self, variables: list) -> None:
        """Makes what this stage keeps for each of the trained variables, where it must exist before the first step."""

    def variables_of_this_rank(self) -> list:
        """Variables of `state` whose values are this rank's own and differ between ranks.

        They are there from `prepare` on. `sync_all` puts the values of all ranks into rank 0's checkpoint.
        """
        return []

    def replicas_of_this_rank(self, step: Step) -> list:
        """Trained variables and slots that differ between ranks with this stage, asked for before an update is made.

        `sync_all` puts those of all ranks into rank 0's checkpoint, from which each rank gets its own.
        """
        return []

    def decide_together(self) -> None:
        """Has what this stage decides for its rank alone decided by all ranks; called before the first step."""

    def begin(self, step: Step) -> None:
        """Reads the state that this step uses, before its loss is differentiated."""

    def scale(self, loss: tf.Tensor, step: Step) -> tf.Tensor:
        """Changes the loss before it is differentiated."""
        return loss

    def describe(self, step: Step, plan: Plan) -> None:
        """Writes down what other ranks must do alike, before anything is transferred; names the plan's owner if so."""
        if self.get_config():
            plan.settings[type(self).__name__] = str(self.get_config())

    def computed(self, step: Step) -> None:
        """Works on gradients that the optimizer itself has just computed, so that nobody else uses them yet."""

    def prepare(self, step: Step) -> None:
        """Makes what this stage keeps for the variables of these gradients, where it does not exist yet."""

    def collect(self, step: Step) -> None:
        """Works on this rank's gradients in every step, also in those that exchange nothing."""

    def local(self, step: Step) -> None:
        """Works on this rank's gradients before any communication."""

    def reduce(self, step: Step) -> None:
        """Combines the gradients of all ranks. At most one stage of a pipeline does this."""

    def reduced(self, step: Step) -> None:
        """Works on the combined gradients before the caller sees them."""

    def gate(self, step: Step, apply: Callable[[], Any]) -> Any:
        """Decides whether and when `apply` runs; returns the resulting op."""
        return apply()

    def after(self, step: Step) -> Any:
        """Moves the stage's own state on; returns an op, or None when there is nothing to run."""
        return None


def gradients_from_elsewhere(owner: str, problem: str) -> ValueError:
    """The error of a stage that must have seen the gradients of a step before the update."""
    expected = "gradients from compute_gradients of this optimizer, or from Pipeline.combine"
    fix = "Call compute_gradients or minimize."
    return ValueError(message(owner, problem, expected, "gradients from elsewhere", fix))


def called_too_early(function: str) -> ValueError:
    """The error of a call that comes before the first update tells which variables are trained."""
    problem, expected = "it is not known yet which variables are trained", "a call after the first update"
    fix = f"In a TF 1 graph call {function} after minimize."
    return ValueError(message(function, problem, expected, "none was made", fix))
