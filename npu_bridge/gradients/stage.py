"""`Stage`, the base class of gradient transformations, and `Step`, one training step's gradients between them."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any, Callable

from npu_bridge.base.errors import KnownKeywords, message
from npu_bridge.base.flat_tensors import map_elementwise
from npu_bridge.base.own_tensorflow import tf
from npu_bridge.gradients.arithmetic import as_gradient, map_values
from npu_bridge.gradients.graph_mode import run_if, tensors_if
from npu_bridge.gradients.losses import Losses, sum_pairs_by_variable


@dataclasses.dataclass(frozen=True)
class TrainedGroup:
    """The variables that a step trains, for steps that do not train all of them.

    Attributes:
      number: int32 scalar, the group of this step; a Python number when executed eagerly.
      frozen: references of the variables that a group does not train, by group; group 0 trains all.
    """

    number: Any
    frozen: tuple

    def trains(self, variable: Any, number: int) -> bool:
        """Returns True for a variable that the group of this number trains."""
        return variable.ref() not in self.frozen[number]


@dataclasses.dataclass
class Step:
    """One training step's gradients between the backward pass and the update, as stages pass them on.

    Attributes:
      grads_and_vars: list of (gradient, variable); a gradient is a tensor, `tf.IndexedSlices` or None.
      losses: the losses of the step and the scales they are multiplied by.
      divisor: the factor that the gradients still carry, a Python number or a float32 scalar tensor. Divided by it they
        are in true units (of the unscaled loss, averaged over the ranks). None when they are in true units.
      on_wire: the tensors that this rank sends, in the order of `grads_and_vars`: tensors, `tf.IndexedSlices` or Nones,
        with rows of equal index added up, rounded to 16 bits where asked, and still multiplied by `divisor`. None when
        this rank sends nothing. The overflow check and the all-reduce both read these tensors.
      is_usable_here: boolean scalar, this rank's own verdict on `on_wire`, or None.
      should_apply: boolean scalar, the decision whether this step's update runs, or None while it is open.
      delivered: the gradients as the pipeline returned them to the caller, who may clip them before the update.
      group: the variables that this step trains; None when it trains all of them.
      is_due: boolean scalar, whether this step reduces and applies accumulated gradients; None when every step does.
      notes: values that a stage keeps for its later hooks, by a key of its own. Values added between `before_reduce`
        and `after_reduce` must be tensors of known shapes, because they can come out of a condition.
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
        """The factor of sums of this step's gradients, a float32 scalar; None without loss scaling."""
        return self.losses.common_scale

    @property
    def gradients(self) -> list:
        """The gradients without the Nones."""
        return [grad for grad, _ in self.grads_and_vars if grad is not None]

    @property
    def updated(self) -> list:
        """The variables that have a gradient."""
        return [variable for grad, variable in self.grads_and_vars if grad is not None]

    def map(self, transform: Callable[[Any], Any]) -> None:
        """Replaces every gradient that is not None by `transform(gradient)`."""
        self.grads_and_vars = [
            (None if grad is None else transform(grad), variable) for grad, variable in self.grads_and_vars
        ]

    def map_elements(self, transform: Callable[[tf.Tensor], tf.Tensor]) -> None:
        """Replaces the values of every gradient by `transform(values)`, an elementwise function.

        Gradients that are combined into one flat tensor stay combined.
        """
        dense = [grad for grad in self.gradients if isinstance(grad, tf.Tensor)]
        made = dict(zip(map(id, dense), map_elementwise(dense, transform)))
        self.map(lambda grad: made[id(grad)] if isinstance(grad, tf.Tensor) else map_values(grad, transform))

    def add_gradients(self, grads_and_vars: Sequence, number: int) -> None:
        """Adds the gradients of one of several losses; `number` is the position of its loss scale."""
        self.grads_and_vars = sum_pairs_by_variable(
            self.grads_and_vars, self.losses.convert_to_common_scale(grads_and_vars, number)
        )

    def multiplied_by(self, factor: Any) -> None:
        """Records one more factor that the gradients carry."""
        self.divisor = factor if self.divisor is None else self.divisor * factor

    def when_due(self, make: Callable[[], list], otherwise: Callable[[], list]) -> list:
        """Returns the tensors of `make` in a step that is due, and those of `otherwise` in any other step."""
        return make() if self.is_due is None else tensors_if(self.is_due, make, otherwise)

    def run_when_due(self, run: Callable[[], Any]) -> Any:
        """Runs an update in a step that is due and does nothing in any other step; returns the op."""
        return run() if self.is_due is None else run_if(self.is_due, run)

    def is_skipped(self) -> tf.Tensor:
        """Returns True when this step is due and its update is skipped; `should_apply` must be known."""
        is_left_out = tf.logical_not(self.should_apply)
        return is_left_out if self.is_due is None else tf.logical_and(self.is_due, is_left_out)


@dataclasses.dataclass(frozen=True)
class Update:
    """The update of one step. Calling it runs the update and returns the op, or None when executed eagerly.

    Attributes:
      run: makes the update.
      variables: the variables that have a gradient.
      slots: returns the optimizer's slots of these variables and creates the missing ones.
    """

    run: Callable[[], Any]
    variables: Sequence[Any] = ()
    slots: Callable[[], list] = list

    def __call__(self) -> Any:
        return self.run()


# The places of stages, in the order in which gradients pass them.
PLACES = (
    "scale",  # the loss is multiplied, and the reduced gradients are divided
    "freeze",  # some variables are left out of a step
    "accumulate",  # gradients of several batches are added up on this rank
    "local clip",  # this rank bounds the gradients that it sends
    "reduce",  # gradients of all ranks are combined
    "verdict",  # this rank checks the gradients that it sends; all ranks decide about the step
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
    """A gradient transformation. A hook that a stage does not override changes nothing.

    A pipeline calls each hook of all its stages before the next hook, in this order:

        create_variables ─► scale_loss ─► backward pass ─► accumulate ─► before_reduce ─► all_reduce ─► after_reduce
          ─► (caller clips) ─► gate ─► update ─► after_update

    In steps that are not due (batches of a window before the last one), `before_reduce` to `after_reduce` do not run.

    Stages use TensorFlow operators only, so one stage serves a TF 1 graph, a `tf.function` and eager execution.
    Settings are fixed at construction. State of one step is kept in its `Step`.

    Stages run in the order of `PLACES`, in whatever order they are passed. Several stages can stand at "transform"
    alone; they keep the order in which they are passed.

    Attributes:
      place: one of `PLACES`.
      gives: names of the guarantees that other stages can rely on.
      needs: names of the guarantees that another stage of the pipeline must give.
      keeps_usable: True for a stage that turns no finite gradient into NaN or Inf, and hides none. Its results are not
        checked again. It matters for stages that reduce and for stages after the verdict.
      scales_loss: True for a stage whose `scale_loss` changes the loss.
      communicates: True for a stage that keeps ranks alike, by exchanging gradients or, after the update, variables.
      transfer_name: prefix of the names of its collectives; empty for a stage without any.
      needs_variables: True for a stage that must know the variable of each gradient.
      spans_batches: True for a stage that makes one update of several batches.
      batches_so_far: the variable that counts the batches since the last update; None for other stages.
      leaves_out: True for a stage that leaves variables out of some steps. Its `accumulate` is also called right after
        the backward pass, with gradients that no other code uses yet (`Losses.is_backward_own`).
      needs_true_units: True for a stage that refuses gradients that another optimizer's loss scale multiplies.
      begins_anew: True for a stage whose variables of this rank and `batches_so_far` restart at zero in a resumed
        training.
      differ_between_ranks: "variables" (trained ones), "slots", both or nothing: the values that can differ between
        ranks. `sync_all` stores those of all ranks in rank 0's checkpoint, from which each rank restores its own.
      copes_with_left_out: True for a stage at or after the update that leaves frozen variables unchanged.
      pipeline: the stages of its pipeline in their order, set by the pipeline. A stage belongs to one pipeline.
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
        """Returns the arguments of the constructor, saved with a Keras model; they must be equal on all ranks."""
        return {}

    @classmethod
    def from_config(cls, config: dict) -> Stage:
        """Makes a stage from the result of `get_config`."""
        return cls(**config)

    def agreed_settings(self, grads_and_vars: Sequence) -> dict:
        """Returns the settings that must be equal on all ranks: texts, numbers and booleans, by name."""
        return {type(self).__name__: str(self.get_config())} if self.get_config() else {}

    def fragments(self, grads_and_vars: Sequence) -> list:
        """Returns positions of gradients, one list for each all-reduce; the lists must be equal on all ranks."""
        return []

    def sent_bytes(self, others: float, ranks: int) -> float | None:
        """Returns how many bytes a rank sends with this stage, for `explain`.

        Args:
          others: mean bytes that a rank sends for one parameter and batch, without this stage.
          ranks: number of ranks, at least 2.
        Returns:
          Mean bytes with this stage; None if they depend on gradients or variables.
        """
        return others

    def state(self) -> dict:
        """Returns the objects with this stage's variables, by the names that object-based checkpoints use."""
        return {}

    def variables_of_this_rank(self) -> list:
        """Returns the variables of `state` whose values differ between ranks.

        They exist after `create_variables`. `sync_all` stores the values of all ranks in rank 0's checkpoint.
        """
        return []

    def create_variables(self, variables: Sequence, gradients: Sequence | None = None) -> None:
        """Creates this stage's state for each variable that has none yet.

        Args:
          variables: the trained variables, or those of one step.
          gradients: the gradients of that step in the same order; None before the first step.
        """

    def scale_loss(self, loss: tf.Tensor, step: Step) -> tf.Tensor:
        """Changes the loss before it is differentiated."""
        return loss

    def accumulate(self, step: Step) -> None:
        """Changes this rank's gradients of every batch, whether its step is due or not."""

    def before_reduce(self, step: Step) -> None:
        """Changes this rank's gradients before they are reduced."""

    def all_reduce(self, step: Step) -> None:
        """Combines the gradients of all ranks. At most one stage of a pipeline does this."""

    def after_reduce(self, step: Step) -> None:
        """Changes the reduced gradients before the caller sees them."""

    def gate(self, step: Step, update: Update) -> Any:
        """Decides whether and when `update` runs; returns the resulting op."""
        return update()

    def after_update(self, step: Step) -> Any:
        """Updates the stage's own state; returns an op, or None when there is nothing to run."""
        return None


def changes_after_verdict(stage: Stage) -> bool:
    """Returns True for a stage that changes gradients after the verdict."""
    is_after = PLACES.index(stage.place) > PLACES.index("verdict")
    return is_after and type(stage).after_reduce is not Stage.after_reduce


def begun_anew(stages: Sequence[Stage]) -> list:
    """Returns the variables of stages that restart at zero in a resumed training."""
    kept = [(*stage.variables_of_this_rank(), stage.batches_so_far) for stage in stages if stage.begins_anew]
    return [variable for variables in kept for variable in variables if variable is not None]


def gradients_from_elsewhere(owner: str, problem: str) -> ValueError:
    """Returns the error of a stage that needs the gradients of a step before the update."""
    expected = "gradients from compute_gradients of this optimizer, or from Pipeline.combine"
    fix = "Call compute_gradients or minimize."
    return ValueError(message(owner, problem, expected, "gradients from elsewhere", fix))


def called_too_early(function: str) -> ValueError:
    """Returns the error of a call that precedes the first update, so that the trained variables are not known."""
    problem, expected = "it is not known yet which variables are trained", "a call after the first update"
    fix = f"In a TF 1 graph call {function} after minimize."
    return ValueError(message(function, problem, expected, "none was made", fix))
