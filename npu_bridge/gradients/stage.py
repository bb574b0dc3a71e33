"""Defines `Stage`, the base class of gradient transformations, with the order of their places, and their roles."""

from __future__ import annotations

import copy
import inspect
import logging
from collections.abc import Sequence
from typing import Any

from npu_bridge import collective
from npu_bridge.base.errors import KeywordChecksMixin, did_you_mean, message, say_once
from npu_bridge.base.own_tensorflow import tf
from npu_bridge.base.plain_config import check_config
from npu_bridge.gradients.step import Step, StepUpdate

# The places of stages. Hooks come first: all stages run a hook, in this order, before any stage runs the next hook.
PLACES = (
    "scale",  # the loss is multiplied; the pipeline divides the gradients after `all_reduce`
    "freeze",  # some variables are left out of a step
    "accumulate",  # gradients of several batches are added up on this rank
    "local clip",  # this rank bounds the gradients that it sends
    "reduce",  # gradients of all ranks are combined
    "verdict",  # in `before_reduce`, this rank checks what it sends; in `gate`, all ranks decide about the step
    "accumulate reduced",  # from here on: reduced gradients in true units
    "clip by value",
    "clip by norm",
    "centralise",
    "transform",  # the place of user-defined stages, in the order of the list
    "guard",  # old values are kept for an update that fails
    "update",
    "synchronise",  # after the update
    "record",
)

# The hooks of stages, in the order in which a pipeline calls them; a TF 1 graph creates the variables of stages later.
HOOKS = (
    "create_variables",
    "scale_loss",
    "each_batch",
    "before_reduce",
    "all_reduce",
    "after_reduce",
    "gate",
    "after_update",
)
# Hooks that only stages of one role have, with the name of the role's class.
_ROLES_WITH_HOOKS = {"scale_loss": "LossStage", "all_reduce": "ReducingStage"}
# The places of stages that make one update from several batches.
SUMMING_PLACES = ("accumulate", "accumulate reduced")
# The guarantees that stages give to others, and need from them.
VERDICT = "a verdict"  # unusable gradients skip the step, on all ranks if they decide together
REDUCED_GRADIENTS = "reduced gradients"  # the gradients of all ranks are combined before the update
FROZEN_UNCHANGED = "unchanged frozen variables"  # by a stage at or after the update


class Stage(KeywordChecksMixin):
    """Base class of gradient transformations. A hook that a stage does not override changes nothing.

    A stage that changes the loss derives from `LossStage`, and a stage that combines the gradients of ranks from
    `ReducingStage`. Other roles have base classes in this module, too.

    A pipeline calls one hook of all its stages before the next hook, in this order:

        create_variables ─► scale_loss ─► backward pass ─► each_batch ─► before_reduce ─► all_reduce ─► after_reduce
          ─► (caller clips) ─► gate ─► update ─► after_update

    Only Keras optimizers run `create_variables` before the first step. In a TF 1 graph and in a custom loop it runs
    after the backward pass, before `each_batch`. A `SelectingStage` also runs `select_variables`, before
    `each_batch`.

    Stages with places after "verdict" run `each_batch` and `before_reduce` early: before other stages add up, clip,
    check and send this rank's gradients.

    In steps that are not due (all batches of an accumulation window but the last), the hooks from `before_reduce` to
    `after_reduce` do not run. If each batch is exchanged, every step is due, but `after_reduce` of stages with places
    after "accumulate reduced" still runs only for the last batch.

    Stages use TensorFlow operators only, so that one stage works in a TF 1 graph, a `tf.function` and eager execution.
    The arguments of the constructor are fixed. The pipeline later sets only the names of collectives (`bind`), and in a
    `DecidingStage` its `stages`, `is_joint` and `checks_scaled_gradients`. A `Step` keeps the state of one step.

    Stages run in the order of `PLACES`, whatever the order in which they are passed. Only "transform", "guard" and
    "record" can be the place of several stages; these keep the order in which they are passed.

    Attributes:
      place: one of `PLACES`.
      gives: names of the guarantees that other stages can rely on.
      needs: names of the guarantees that another stage of the pipeline must give.
      keeps_usable: True for a stage that makes no NaN or Inf from finite gradients, and hides no NaN or Inf. Its
        results are not checked again.
      needs_variables: True for a stage that needs the variable of each gradient.
      needs_unscaled_gradients: True for a stage that cannot be inside another optimizer that scales the loss.
    """

    place = "transform"
    gives: tuple = ()
    needs: tuple = ()
    keeps_usable = False
    needs_variables = False
    needs_unscaled_gradients = False

    def __init_subclass__(cls, **keywords: Any):
        super().__init_subclass__(**keywords)
        is_role = cls.__module__ == __name__  # defines hooks itself
        for name, found in () if is_role else vars(cls).items():
            role = _ROLES_WITH_HOOKS.get(name, "Stage")
            if role not in [base.__name__ for base in cls.__mro__]:
                problem, expected = f"only a {role} has the hook {name}", f"a class derived from {role}"
                fix = f"Write class {cls.__name__}(stages.{role})."
                raise TypeError(message(cls.__name__, problem, expected, cls.__bases__[0].__name__, fix))
            takes_step = inspect.isfunction(found) and "step" in inspect.signature(found).parameters
            if takes_step and not name.startswith("_") and not any(hasattr(base, name) for base in cls.__bases__):
                fix = did_you_mean(name, HOOKS, "Rename it; a method for your own use begins with _.")
                problem = f"no pipeline calls the method {name}"
                say_once(logging.WARNING, message(cls.__name__, problem, f"one of {', '.join(HOOKS)}", name, fix))

    def __repr__(self) -> str:
        arguments = ", ".join(f"{name}={value!r}" for name, value in self.get_config().items())
        return f"{type(self).__name__}({arguments})"

    def __copy__(self) -> Stage:
        """Makes a stage of equal settings, so that one list of stages serves several optimizers.

        The copy is made from `get_config`, and has no variables. Without `get_config`, the attributes are copied: make
        variables in `create_variables`, so that no two optimizers share them.

        Raises:
          TypeError: `get_config` is inherited, but the constructor has other arguments.
        """
        kind = type(self)
        if kind.get_config is not Stage.get_config:
            config = self.get_config()
            check_config(kind, config)
            return kind.from_config(config)
        made = object.__new__(type(self))
        vars(made).update(
            (name, copy.copy(value) if isinstance(value, (dict, list, set)) else value)
            for name, value in vars(self).items()
        )
        return made

    def get_config(self) -> dict:
        """Returns the constructor's arguments, which are saved with Keras models and must be equal on all ranks."""
        return {}

    @classmethod
    def from_config(cls, config: dict) -> Stage:
        """Makes a stage from the result of `get_config`."""
        return cls(**config)

    def agreed_settings(self, grads_and_vars: Sequence) -> dict:
        """Returns a dict of settings that must be equal on all ranks: strings, numbers and booleans by name."""
        return {type(self).__name__: str(self.get_config())} if self.get_config() else {}

    def sent_bytes(self, other_bytes: float, ranks: int) -> float | None:
        """Returns the bytes that a rank sends for one parameter and batch with this stage, for `explain`.

        Args:
          other_bytes: mean bytes that a rank sends for one parameter and batch without this stage.
          ranks: number of ranks, at least 2.
        Returns:
          Mean bytes with this stage; None if the bytes depend on gradients or variables.
        """
        return other_bytes

    def state(self) -> dict:
        """Returns a dict from names in object-based checkpoints to the objects that hold this stage's variables."""
        return {}

    def variables_of_this_rank(self) -> list:
        """Returns the variables of `state` whose values differ between ranks; call after `create_variables`.

        `sync_all` stores the values of all ranks in rank 0's checkpoint.
        """
        return []

    def create_variables(self, variables: Sequence, gradients: Sequence | None = None) -> None:
        """Creates the state of this stage for new variables.

        Args:
          variables: the trained variables, or the variables of one step.
          gradients: the gradients of the step in the order of `variables`; None before the first step.
        """

    def each_batch(self, step: Step) -> None:
        """Changes this rank's gradients of every batch, even if the gradients are only accumulated in this step.

        Here and in `before_reduce` the gradients are still multiplied by `step.divisor`, if it is not None: multiply
        bounds and added terms by it, too.
        """

    def before_reduce(self, step: Step) -> None:
        """Changes this rank's gradients before they are reduced."""

    def after_reduce(self, step: Step) -> None:
        """Changes the reduced gradients before the caller sees them."""

    def gate(self, step: Step, update: StepUpdate) -> Any:
        """Runs `update`, with code before or after it; returns the resulting op.

        Only a `DecidingStage` and a `SummingStage` may leave `update` out. Loss scales and counters rely on it.
        """
        return update()

    def after_update(self, step: Step) -> Any:
        """Updates the state of the stage; returns the op, or None if there is nothing to run.

        In a TF 1 graph, stages that scale, select, sum or reduce run this hook without waiting for the update.
        """
        return None


class LossStage(Stage):
    """Base class of stages that change the loss before the backward pass."""

    def scale_loss(self, loss: tf.Tensor, step: Step) -> tf.Tensor:
        """Returns the loss to differentiate in place of `loss`, which no `ScalingStage` has scaled yet."""
        return loss


class ScalingStage(LossStage):
    """Base class of stages that multiply the loss or gradients by loss scales; the pipeline divides reduced gradients.

    Attributes:
      managers: the managers of the loss scales, in the order of `loss_id`.
    """

    place = "scale"
    managers: tuple = ()


class SelectingStage(Stage):
    """Base class of stages that leave variables out of steps."""

    place = "freeze"
    needs_unscaled_gradients = True

    def select_variables(self, step: Step) -> None:
        """Sets `step.group`, the variables that this step trains. Runs once per step, before `each_batch`.

        If the optimizer itself computes the gradients of a single loss, this method runs right after the backward pass,
        before other code uses the gradients.
        """
        raise NotImplementedError


class ExchangingStage(Stage):
    """Base class of stages that exchange gradients between ranks or, after the update, variables.

    Attributes:
      transfer_name: prefix of the names of the stage's collectives.
      differ_between_ranks: values that can differ between ranks: "variables" (trained variables), "slots", both, or
        nothing. `sync_all` stores the values of all ranks in rank 0's checkpoint; each rank restores its own values.
    """

    transfer_name = ""
    differ_between_ranks: tuple = ()

    def bind(self, name: str, first_parameters: Sequence[int] | None = None) -> None:
        """Names the collectives of the stage after its optimizer, and sets where the optimizer's fragments begin.

        Args:
          name: prefix of the names of the optimizer's collectives; the same on every rank.
          first_parameters: positions of the parameters at which all-reduce fragments begin; None for the split of the
            process.
        """
        self.transfer_name = name

    def fragments(self, grads_and_vars: Sequence) -> list[list[int]]:
        """Returns for each all-reduce fragment the positions of its gradients; empty without such fragments."""
        return []


class ReducingStage(ExchangingStage):
    """Base class of stages that combine the gradients of all ranks; a pipeline has at most one."""

    place = "reduce"
    gives = (REDUCED_GRADIENTS,)

    def before_reduce(self, step: Step) -> None:
        """Sets `step.on_wire` to the gradients that this rank sends: all of them, as they are."""
        if collective.current().size > 1:
            step.on_wire = [grad for grad, _ in step.grads_and_vars]

    def all_reduce(self, step: Step) -> None:
        """Replaces the gradients by a combination of `step.on_wire` of all ranks; also called on one rank.

        The results stay multiplied by `step.divisor`, by which the pipeline then divides. A stage that divides them
        itself calls `step.mark_as_unscaled()`.
        """


class DecidingStage(Stage):
    """Base class of stages that check gradients and decide whether a step is applied.

    Attributes:
      transfer_name: prefix of the names of the stage's collectives; empty if each rank decides alone.
      is_joint: whether all ranks decide together, instead of each rank alone.
      checks_scaled_gradients: True if the inner optimizer itself checks gradients before they are divided by the loss
        scale. This stage then makes the same check, so that both skip the same steps and the loss scale shrinks.
      stages: all stages of the pipeline, which sets them.
    """

    place = "verdict"
    gives = (VERDICT,)
    transfer_name = ""
    is_joint = False
    checks_scaled_gradients = False
    stages: Sequence[Stage] = ()


class SummingStage(Stage):
    """Base class of stages that make one update from several batches; their place is one of `SUMMING_PLACES`.

    Attributes:
      batches: the number of batches of an update.
    """

    batches = 1

    def add_reduced(self, step: Step) -> tf.Tensor:
        """Adds reduced gradients to the sums, at "accumulate reduced"; returns whether this is the window's last batch.

        Only then do `after_reduce` of this stage, which sets the gradients to the sums, and of later stages run.
        """
        raise NotImplementedError

    @property
    def batch_counters(self) -> list:
        """The variables that count the batches since the last update; more than one for variables trained apart."""
        raise NotImplementedError


class RestartingStage(Stage):
    """Base class of stages whose variables restart at zero when training resumes."""


class SynchronisingStage(ExchangingStage):
    """Base class of stages that make variables equal on all ranks after updates, instead of averaging gradients."""

    place = "synchronise"
    needs_variables = True
    needs_unscaled_gradients = True

    def sync_all(self) -> Any:
        """Makes all trained variables equal on all ranks; returns the op, or None in eager execution."""
        raise NotImplementedError


def is_hook_overridden(stage_class: type[Stage], hook: str) -> bool:
    """Returns whether a class of stages overrides a hook; False for the hooks of the base classes in this module."""
    found = getattr(stage_class, hook, None)
    return found is not None and found.__module__ != __name__


def has_role(stage: Stage) -> bool:
    """Returns whether a stage changes gradients in the way of its role; a custom stage usually has none."""
    return isinstance(stage, (ScalingStage, SelectingStage, ExchangingStage, DecidingStage, SummingStage))


def changes_gradients(stage: Stage, hooks: Sequence[str] = ("each_batch", "before_reduce", "after_reduce")) -> bool:
    """Returns whether a stage changes gradients in one of the given hooks.

    A stage with a role does not count if its place is "verdict" or before: the overflow check reads its results anyway.
    """
    is_early = PLACES.index(stage.place) <= PLACES.index("verdict")
    return not (has_role(stage) and is_early) and any(is_hook_overridden(type(stage), hook) for hook in hooks)


def variables_of(state: dict) -> list:
    """Returns the variables in a result of `Stage.state`, such as the loss scale, its counters and skipped steps."""
    return [var for part in state.values() for var in (part.variables if isinstance(part, tf.Module) else [part])]


def variables_restarting_at_zero(stages: Sequence[Stage]) -> list:
    """Returns the variables of stages that restart at zero when training resumes."""
    return [
        variable for stage in stages if isinstance(stage, RestartingStage) for variable in variables_of(stage.state())
    ]


def unknown_gradients_error(owner: str, problem: str) -> ValueError:
    """Returns the error for an update with gradients that have not passed the stage in this step.

    Args:
      owner: name of the stage.
      problem: the problem, for the message.
    """
    expected = "gradients from compute_gradients of this optimizer, or from Pipeline.combine"
    fix = "Call compute_gradients or minimize."
    return ValueError(message(owner, problem, expected, "other gradients", fix))


def synced_too_early_error() -> ValueError:
    """Returns the error for `sync_all` before the first update, when the trained variables are unknown."""
    problem, expected = "the trained variables are not known yet", "a call after the first update"
    fix = "In a TF 1 graph call sync_all after minimize."
    return ValueError(message("sync_all", problem, expected, "no update so far", fix))
