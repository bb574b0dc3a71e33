"""`Stage`, the base class of gradient transformations, and `Step`, one training step's gradients between them."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any, Callable

from npu_bridge.base.errors import KnownKeywords, message
from npu_bridge.base.flat_tensors import mapped
from npu_bridge.base.own_tensorflow import tf
from npu_bridge.gradients.arithmetic import as_gradient, map_values
from npu_bridge.gradients.graph_mode import run_if, tensors_if
from npu_bridge.gradients.losses import Losses, sum_of_pairs


@dataclasses.dataclass(frozen=True)
class TrainedGroup:
    """Which variables a step trains, where it does not train all of them.

    Attributes:
      number: int32 scalar, the group of this step; a Python number when executed eagerly.
      frozen: for each group the references of the variables that it does not train; group 0 trains all.
    """

    number: Any
    frozen: tuple

    def trains(self, variable: Any, number: int) -> bool:
        """True for a variable that the group of this number trains."""
        return variable.ref() not in self.frozen[number]


@dataclasses.dataclass
class Step:
    """One training step's gradients, between the backward pass and the update: what several stages share.

    Attributes:
      grads_and_vars: list of (gradient, variable); a gradient is a tensor, `tf.IndexedSlices` or None.
      losses: the losses of the step and the scales they are multiplied by.
      divisor: what the gradients are still multiplied by, as a Python number or a float32 scalar tensor; dividing by
        it gives them in true units (of the unscaled loss, averaged over the ranks). None when they are in true units.
      on_wire: what this rank sends of each gradient (rows that share an index added up, rounded to 16 bits where
        asked, still multiplied by `divisor`): tensors, `tf.IndexedSlices` or Nones in the order of `grads_and_vars`;
        None when it sends nothing. Local gradients are judged and transferred from here.
      is_usable_here: boolean scalar, this rank's own verdict on what it sends, or None.
      should_apply: boolean scalar, the decision whether this step's update happens, or None while it is open.
      delivered: the gradients as the pipeline handed them to the caller; what comes back may be clipped.
      group: which variables this step trains; None when it trains all of them.
      is_due: boolean scalar, whether this step exchanges and applies what was accumulated; None when every step does.
      notes: what a stage keeps for its later hooks, under a key of its own. What is added between `before_reduce` and
        `after_reduce` must be tensors of known shapes, since they may come out of a condition.
    """

    grads_and_vars: list = dataclasses.field(default_factory=list)
    losses: Losses = dataclasses.field(default_factory=Losses)
    divisor: Any = None
    on_wire: list | None = None
    is_usable_here: tf.Tensor | None = None
    should_apply: tf.Tensor | None = None
    delivered: list = dataclasses.field(default_factory=list)
    group: TrainedGroup | None = None
    is_due: tf.Tensor | None = None
    notes: dict = dataclasses.field(default_factory=dict)

    def __setattr__(self, name, value):
        if name == "grads_and_vars":
            value = [(as_gradient(grad, variable), variable) for grad, variable in value]
        super().__setattr__(name, value)

    @property
    def loss_scale(self) -> tf.Tensor | None:
        """What sums of this step's gradients are multiplied by, a float32 scalar; None without loss scaling."""
        return self.losses.common_scale

    @property
    def gradients(self) -> list:
        """The gradients that exist, without the Nones."""
        return [grad for grad, _ in self.grads_and_vars if grad is not None]

    @property
    def updated(self) -> list:
        """The variables that have a gradient."""
        return [variable for grad, variable in self.grads_and_vars if grad is not None]

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

    def add_gradients(self, grads_and_vars: Sequence, number: int) -> None:
        """Adds the gradients of one loss, multiplied by the scale of that number, to those of other losses."""
        self.grads_and_vars = sum_of_pairs(self.grads_and_vars, self.losses.with_common_scale(grads_and_vars, number))

    def multiplied_by(self, factor: Any) -> None:
        """Notes that the gradients carry one more factor."""
        self.divisor = factor if self.divisor is None else self.divisor * factor

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


@dataclasses.dataclass(frozen=True)
class Update:
    """The update of one step: call it to run it; it returns the op, or None when executed eagerly.

    Attributes:
      run: makes the update.
      variables: those that have a gradient.
      slots: gives the optimizer's slots of these variables, making those that do not exist yet.
    """

    run: Callable[[], Any]
    variables: Sequence[Any] = ()
    slots: Callable[[], list] = list

    def __call__(self) -> Any:
        return self.run()


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
    "transform",  # the place of users' own stages; several stand here in the order of the list
    "guard",  # old values are kept for an update that fails
    "update",
    "synchronise",  # after the update
    "record",
)


class Stage(KnownKeywords):
    """One gradient transformation. Every hook leaves what it gets unchanged unless a stage overrides it.

    A pipeline calls each hook of all its stages before the next hook, in this order:

        create_variables ─► scale_loss ─► backward pass ─► accumulate ─► before_reduce ─► all_reduce ─► after_reduce
          ─► (caller clips) ─► gate ─► update ─► after_update

    In steps that are not due (batches of a window before the last one), `before_reduce` to `after_reduce` do not run.

    Stages use TensorFlow ops only, so that one stage serves a TF 1 graph, a `tf.function` and eager execution. What a
    stage is made of is set at construction; what belongs to one step is kept in its `Step`.

    The order of stages is that of `PLACES`, whatever the order in which they are given. Only at "transform" can several
    stand, in the order in which they are given.

    Attributes:
      place: one of `PLACES`.
      gives: what other stages can rely on when this one is there.
      needs: what another stage of the pipeline must give.
      keeps_usable: True for a stage that never makes an unusable gradient of usable ones, and never hides one: then
        its results need not be judged again. Only stages that reduce, and those after the verdict, are asked.
      scales_loss: True for a stage whose `scale_loss` changes the loss.
      communicates: True for a stage that keeps ranks together: by exchanging gradients, or variables after the update.
      transfer_name: prefix of the names of its transfers between ranks; empty where it makes none.
      needs_variables: True for a stage that must know of which variables gradients are.
      spans_batches: True for a stage that makes one update of several batches, and `batches_so_far` then the variable
        that counts those since the last update; None while there is none.
      leaves_out: True for a stage that leaves variables out of some steps. Its `accumulate` is also called before, with
        gradients that the optimizer has just computed and that nobody else uses yet (`Losses.is_backward_own`).
      needs_true_units: True for a stage that must not get gradients that another optimizer's loss scale multiplies.
      begins_anew: True for a stage whose variables of this rank and `batches_so_far` begin with zeros in a training
        that goes on from a checkpoint.
      differ_between_ranks: "variables" (trained ones), "slots", both or nothing: what this stage lets ranks have
        different values of. `sync_all` puts those of all ranks into rank 0's checkpoint, from which each gets its own.
      copes_with_left_out: True for a stage at the update, or after it, that leaves such variables as they are.
      pipeline: the stages of its pipeline, in their order; set by the pipeline. A stage belongs to one pipeline.
    """

    place = "transform"
    gives: tuple = ()
    needs: tuple = ()
    keeps_usable = False
    scales_loss = False
    communicates = False
    transfer_name = ""
    needs_variables = False
    spans_batches = False
    batches_so_far: Any = None
    leaves_out = False
    needs_true_units = False
    begins_anew = False
    differ_between_ranks: tuple = ()
    copes_with_left_out = False
    pipeline: tuple = ()

    def __repr__(self) -> str:
        arguments = ", ".join(f"{name}={value!r}" for name, value in self.get_config().items())
        return f"{type(self).__name__}({arguments})"

    def get_config(self) -> dict:
        """The arguments of the constructor, for saving with a Keras model; on all ranks they must be the same."""
        return {}

    @classmethod
    def from_config(cls, config: dict) -> Stage:
        """The counterpart of `get_config`."""
        return cls(**config)

    def agreed_settings(self, grads_and_vars: Sequence) -> dict:
        """What all ranks must have alike before anything is transferred: texts, numbers and booleans, by name."""
        return {type(self).__name__: str(self.get_config())} if self.get_config() else {}

    def fragments(self, grads_and_vars: Sequence) -> list:
        """Positions of the gradients that are sent together, a list for each transfer; all ranks must cut alike."""
        return []

    def sent_bytes(self, others: float, ranks: int) -> float | None:
        """What this stage makes of the bytes that a rank sends, for `explain`.

        Args:
          others: bytes of one parameter's gradient that a rank sends for a batch, on average, without this stage.
          ranks: number of ranks, at least 2.
        Returns:
          The same with this stage; None if that depends on gradients or variables.
        """
        return others

    def state(self) -> dict:
        """Objects that hold variables of this stage, by name: what an object-based checkpoint saves."""
        return {}

    def variables_of_this_rank(self) -> list:
        """Variables of `state` whose values are this rank's own and differ between ranks.

        They are there after `create_variables`. `sync_all` puts the values of all ranks into rank 0's checkpoint.
        """
        return []

    def create_variables(self, variables: Sequence, gradients: Sequence | None = None) -> None:
        """Makes what this stage keeps for each variable, where it does not exist yet.

        Args:
          variables: the trained ones, or those of a step.
          gradients: that step's, in the same order; None before the first step, when they are not known.
        """

    def scale_loss(self, loss: tf.Tensor, step: Step) -> tf.Tensor:
        """Changes the loss before it is differentiated."""
        return loss

    def accumulate(self, step: Step) -> None:
        """Works on this rank's gradients of every batch, also of those after which nothing is exchanged."""

    def before_reduce(self, step: Step) -> None:
        """Works on this rank's gradients before any communication."""

    def all_reduce(self, step: Step) -> None:
        """Combines the gradients of all ranks. At most one stage of a pipeline does this."""

    def after_reduce(self, step: Step) -> None:
        """Works on the combined gradients before the caller sees them."""

    def gate(self, step: Step, update: Update) -> Any:
        """Decides whether and when `update` runs; returns the resulting op."""
        return update()

    def after_update(self, step: Step) -> Any:
        """Moves the stage's own state on; returns an op, or None when there is nothing to run."""
        return None


def changes_after_verdict(stage: Stage) -> bool:
    """True for a stage that changes gradients after they were judged."""
    is_after = PLACES.index(stage.place) > PLACES.index("verdict")
    return is_after and type(stage).after_reduce is not Stage.after_reduce


def begun_anew(stages: Sequence[Stage]) -> list:
    """The variables of stages that begin with zeros in a training that goes on from a checkpoint."""
    kept = [(*stage.variables_of_this_rank(), stage.batches_so_far) for stage in stages if stage.begins_anew]
    return [variable for variables in kept for variable in variables if variable is not None]


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
