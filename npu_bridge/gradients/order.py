"""Sorts stages by their places, which stage.py lists, and rejects stages that do not fit together."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from npu_bridge.base.errors import message, shown
from npu_bridge.gradients.stage import (
    FROZEN_UNCHANGED,
    PLACES,
    REDUCED_GRADIENTS,
    ExchangingStage,
    ReducingStage,
    ScalingStage,
    SelectingStage,
    Stage,
    has_role,
)

_PLACES_OF_ROLES = PLACES[: PLACES.index("verdict") + 1]  # later ones come after this rank's gradients
_SHARED_PLACES = ("transform", "guard", "record")
# By hook that changes this rank's gradients: a place and a list of places. A custom stage (one without a role) at a
# place of the list runs the hook in turn. At any other place, it runs the hook early: just before the first place. The
# hooks need a row each: a custom `each_batch` must come before that of `Accumulate`, a custom `before_reduce` after it.
_OWN_GRADIENTS = {
    "each_batch": ("accumulate", PLACES[: PLACES.index("accumulate")]),
    "before_reduce": ("local clip", ("local clip",)),
}


def sort_stages(stages: Sequence[Any], owner: str) -> tuple:
    """Sorts stages by their places; several stages at "transform", "guard" or "record" keep their given order.

    Args:
      stages: the stages, in any order.
      owner: name of the optimizer, for messages.
    Raises:
      TypeError: an element is not a stage.
      ValueError: a place is unknown or used twice, two stages reduce gradients, or no other stage gives a guarantee
        that a stage needs.
    """
    for stage in stages:
        check_stage(stage, owner)
    communicating = [name_of_stage(stage) for stage in stages if isinstance(stage, ExchangingStage)]
    if len(communicating) > 1:
        problem = "gradients would be reduced more than once"
        expected = f"at most one stage that communicates, in the order {', '.join(PLACES)}"
        raise ValueError(message(owner, problem, expected, ", ".join(communicating), "Keep one of these stages."))
    ordered = tuple(sorted(stages, key=lambda stage: PLACES.index(stage.place)))  # at one place in the given order
    for first, second in zip(ordered, ordered[1:]):
        if first.place == second.place and first.place not in _SHARED_PLACES:
            names = f"{name_of_stage(first)} and {name_of_stage(second)}"
            problem = f"{names} have the same place, {first.place!r}"
            expected = f"one stage at each place, in the order {', '.join(PLACES)}"
            raise ValueError(message(owner, problem, expected, names, "Keep one of these stages."))
    _check_needs(ordered, owner)
    _check_batches_are_reduced(ordered, owner)
    _check_can_leave_out_variables(ordered, owner)
    return ordered


def order_for_hook(stages: Sequence[Stage], hook: str) -> tuple:
    """Returns the order in which stages run a hook: usually the order of their places.

    `scale_loss` runs in stages that multiply the loss by a scale last, so that other stages get the loss as it is.
    `each_batch` and `before_reduce` change the gradients of this rank. At places where the change would be lost, stages
    run these hooks early: before other stages add up, clip, check and send the gradients. A stage that reduces runs
    them at "reduce" wherever its place is, so that it sends what the other stages have changed.
    """
    if hook == "scale_loss":
        return tuple(sorted(stages, key=lambda stage: isinstance(stage, ScalingStage)))
    if hook not in _OWN_GRADIENTS:
        return tuple(stages)
    first_use, kept_places = _OWN_GRADIENTS[hook]

    def turn(stage):
        place = "reduce" if isinstance(stage, ReducingStage) else stage.place
        keeps_place = place in (_PLACES_OF_ROLES if has_role(stage) else kept_places)
        return PLACES.index(place) if keeps_place else PLACES.index(first_use) - 0.5

    return tuple(sorted(stages, key=turn))  # stages of equal turn keep their order


def check_stage(stage: Any, owner: str) -> None:
    """Checks that an object is a stage, and that its `place` in the order of stages is known.

    Raises:
      TypeError: `stage` is not a stage, but a class, for example.
      ValueError: `place` of the stage is not in `PLACES`.
    """
    if not isinstance(stage, Stage):
        fix = f"Write {stage.__name__}(...)." if isinstance(stage, type) else "Pass objects of npu_bridge.stages."
        problem = "an element of stages is not a stage"
        raise TypeError(message(owner, problem, "a npu_bridge.stages.Stage", shown(stage), fix))
    if stage.place not in PLACES:
        problem = f"the stage {name_of_stage(stage)} has an unknown place"
        raise ValueError(message(owner, problem, f"one of {', '.join(PLACES)}", shown(stage.place), "Set its `place`."))


def name_of_stage(stage: Stage) -> str:
    """Returns the class name of a stage, for messages."""
    return type(stage).__name__


def _check_needs(stages, owner):
    for stage in stages:
        given = {gift for other in stages if other is not stage for gift in other.gives}
        missing = [need for need in stage.needs if need not in given]
        if missing:
            names = ", ".join(name_of_stage(other) for other in stages)
            problem = f"{name_of_stage(stage)} needs {missing[0]}, which no other stage gives"
            fix = f"Add a stage that gives {missing[0]}."
            if missing[0] == REDUCED_GRADIENTS:
                fix = "Set is_distributed=True, which averages gradients over the ranks."
            raise ValueError(message(owner, problem, f"a stage that gives {missing[0]}", f"only {names}", fix))


def _check_batches_are_reduced(stages, owner):
    """Rejects a sum of reduced gradients beside a stage with which each rank updates with its own gradients."""
    summing = [stage for stage in stages if stage.place == "accumulate reduced"]
    unreduced = [each for each in stages if isinstance(each, ExchangingStage) and REDUCED_GRADIENTS not in each.gives]
    for stage, other in zip(summing, unreduced):
        problem = f"{name_of_stage(stage)} adds up gradients that are equal on all ranks, but with "
        problem += f"{name_of_stage(other)} they differ"
        got = f"{name_of_stage(stage)} ({stage.place}) and {name_of_stage(other)} ({other.place})"
        fix = f"Leave exchange='batch' out of {name_of_stage(stage)}."
        raise ValueError(message(owner, problem, "a stage that reduces gradients", got, fix))


def _check_can_leave_out_variables(stages, owner):
    """Rejects stages that need every variable in every step, if another stage leaves variables out."""
    leaving = next((stage for stage in stages if isinstance(stage, SelectingStage)), None)
    for stage in stages if leaving is not None else ():
        is_of_all = stage.place in ("update", "synchronise") and FROZEN_UNCHANGED not in stage.gives
        is_of_each = isinstance(stage, ExchangingStage) or stage.place == "accumulate reduced"
        if is_of_all or (is_of_each and stage.needs_variables):
            problem = (
                f"{name_of_stage(leaving)} leaves variables out of some steps, but {name_of_stage(stage)} needs all "
                f"variables in every step"
            )
            expected = "only one of these two stages"
            got = f"{name_of_stage(leaving)} ({leaving.place}) and {name_of_stage(stage)} ({stage.place})"
            raise ValueError(message(owner, problem, expected, got, "Remove one of the two."))
