"""Measures a band of losses from repeats of a training, and decides whether another training stays inside the band.

Repeats are trainings that differ only in things that must not matter: seeds, the order of sums, rounding. Their losses
spread around the mean. The spread changes along a training: with differences in rounding only, it begins at 0 and grows
a millionfold. So the spread at a step is estimated from that step and the steps around it; z is a deviation of the loss
in units of this spread.

A single step shows little, so medians of z over windows of several lengths are compared with limits. The limits are
quantiles of Student's t, with as many degrees of freedom as the repeats really have, because deviations of neighbouring
steps are correlated. If they are correlated over the whole training, three repeats are only three independent numbers.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from npu_bridge.reporting.history import to_json_value
from npu_run.compare.losses import Losses
from npu_run.compare.spread import (
    count_independent_deviations,
    median_spread,
    rms,
    running_mean,
    running_medians,
    single_step_noise,
    t_quantile,
)
from npu_run.compare.verdict import NotComparableError, Verdict

# Chance of a false alarm in one comparison: 50 pairs together stay below one in ten.
FALSE_ALARM = 1e-3
# A loss is known only to half a bit of float32, even if repeats agree better.
_ROUNDING = 2.0**-24
# The shortest window of a departure: in a longer training, shorter ones are spikes.
_SHORTEST_WINDOW = 8
# Without repeats: a whole window beyond this many times the noise of single steps is not noise.
_FAR = 8.0
# Without repeats: a first difference beyond this part of the loss is not rounding. In lower precision, rounding
# one number in the other direction shows in the loss.
_JUMP = {"float16": 2.0**-8, "bfloat16": 2.0**-5}
_JUMP_OF_FLOAT32 = 2.0**-14
# A band contains its own repeats with this much room.
_ROOM = 1.5
_HOW_TO_GET_ONE = "Train A several times with npu-run --repeat 3, and name the folder of the repeats."


class _IdenticalRepeatsError(NotComparableError):
    """Raised if the repeats are equal bit for bit, so that there is no band."""


class LossBand(NamedTuple):
    """The range of expected losses at each step.

    Attributes:
      steps: global steps, ascending.
      center: the mean loss of the repeats at each step.
      spread: standard deviation of a training's loss around the center, estimated from nearby steps too.
      repeats: the number of repeats.
      limits: for each window length, the largest magnitude of a median of z that still counts as noise.
      freedom: degrees of freedom of `spread`.
    """

    steps: np.ndarray
    center: np.ndarray
    spread: np.ndarray
    repeats: int
    limits: dict[int, float]
    freedom: float


def measure_band(runs: Sequence[Losses]) -> LossBand:
    """Measures the band of several repeats of a training.

    Args:
      runs: at least two repeats. Only steps at which all repeats have a finite loss are used.
    Raises:
      NotComparableError: there is only one repeat, the repeats have no step in common, or they do not differ at all.
    """
    if len(runs) < 2:
        raise NotComparableError(f"One training has no band. {_HOW_TO_GET_ONE}")
    steps, losses = align_losses(runs)
    known = np.isfinite(losses).all(axis=0)
    steps, losses = steps[known], losses[:, known]
    if not len(steps):
        raise NotComparableError(
            f"The repeats in {_folder_of_repeats(runs)} have no step with a finite loss in common."
        )
    if (losses == losses[0]).all():
        raise _IdenticalRepeatsError(
            f"The {len(runs)} repeats in {_folder_of_repeats(runs)} are identical, so there is no band; "
            f"vary something else: npu-run --repeat {len(runs)} --vary rounding, seed or order."
        )
    return _compute_band(steps, losses)


def judge_losses(band: LossBand, runs: Sequence[Losses], name: str = "A") -> Verdict:
    """Decides whether a training, or the mean of several repeats of a training, stays in a band.

    Args:
      band: the band of A.
      runs: the runs of B.
      name: "A" or "B", the training to which the band belongs, for the text of the verdict.
    Returns:
      A verdict on "losses". In its `facts`, `step` is the global step at which B left the band, or None.
    Raises:
      NotComparableError: B has no step in common with the band.
    """
    steps, losses = align_losses(runs, band.steps)
    if not len(steps):
        raise _make_no_common_step_error(band.steps, runs)
    at = np.searchsorted(band.steps, steps)
    value = losses.mean(axis=0)
    half = band.spread[at] * math.sqrt(1 / len(runs) + 1 / band.repeats)
    z = (value - band.center[at]) / half
    far = _find_steps_outside_band(z, band, len(steps))
    return _make_verdict(steps, value, band.center[at], half, z, far, band, name)


def compare_losses(a: Sequence[Losses], b: Sequence[Losses]) -> tuple[Verdict, LossBand | None]:
    """Compares the losses of two trainings by the band of A, or by the band of B if A has no repeats.

    Without repeats of either training there is no band. Then losses that are equal bit for bit are inside. Losses are
    outside if they suddenly differ after steps with equal bits, which show that there is no noise, or if they differ by
    many times the noise of single steps. In all other cases the verdict is "cannot be told".

    Raises:
      NotComparableError: the trainings have no step in common, or the repeats give no band.
    """
    notes = _comparison_notes(a, b)
    band = None
    if max(len(a), len(b)) > 1:
        of_a = len(a) > 1
        try:
            band = measure_band(a if of_a else b)
        except _IdenticalRepeatsError as error:
            notes.append(str(error))
        else:
            verdict = judge_losses(band, b if of_a else a, "A" if of_a else "B")
            return verdict._replace(notes=(*notes, *verdict.notes)), band
    return _compare_without_band(a[0], b[0])._replace(notes=tuple(notes)), band


def _comparison_notes(a: Sequence[Losses], b: Sequence[Losses]) -> list[str]:
    notes = []
    if a[0].ranks and b[0].ranks and a[0].ranks != b[0].ranks:
        notes.append(
            f"A trained on {a[0].ranks} ranks, B on {b[0].ranks}: their losses are of different batches, unless the "
            f"batch of a rank was changed, too."
        )
    if 2 in (len(a), len(b)) and max(len(a), len(b)) == 2:
        notes.append(
            "The band of two repeats is wide: B differs only if it is hundreds of times as far away; make three "
            "repeats or more."
        )
    return notes


def align_losses(runs: Sequence[Losses], steps: np.ndarray | None = None) -> tuple[np.ndarray, np.ndarray]:
    """Returns the steps that all runs (and `steps`, if given) have in common, and a row of losses for each run."""
    common = runs[0].steps if steps is None else steps
    for run in runs:
        common = np.intersect1d(common, run.steps)
    losses = np.array([run.values[np.searchsorted(run.steps, common)] for run in runs])
    return common, losses.reshape(len(runs), len(common))


def _compute_band(steps: np.ndarray, losses: np.ndarray) -> LossBand:
    repeats, count = losses.shape
    center = losses.mean(axis=0)
    apart = losses - center
    reach = min(max(5, count // 10), 100)
    variance = running_mean((apart**2).sum(axis=0) / (repeats - 1), reach)
    spread = np.sqrt(variance + (_ROUNDING * np.abs(center)) ** 2)
    z = apart / (spread * math.sqrt((repeats - 1) / repeats))
    lengths, limits = _window_lengths(count), {}
    numbers, pieces = count_independent_deviations(z)
    freedom = (repeats - 1) * max(1.0, numbers)
    for length in lengths:
        medians = running_medians(z, length)
        # Slow drifts are hidden in single steps but show in long windows, which have their own freedom.
        own, pieces = count_independent_deviations(medians, length)
        own = max(1.0, min(own, numbers))
        chance = FALSE_ALARM / (own * pieces * len(lengths))
        limit = max(rms(medians), median_spread(length)) * t_quantile(chance, (repeats - 1) * own)
        limits[length] = max(limit, _ROOM * float(np.abs(medians).max()))
    return LossBand(steps, center, spread, repeats, limits, freedom)


def _window_lengths(count: int) -> list[int]:
    """Returns window lengths for a number of steps: from a few steps to half the training, each twice the previous."""
    lengths = [min(_SHORTEST_WINDOW, max(1, count // 4))]
    while lengths[-1] * 4 <= count:
        lengths.append(lengths[-1] * 2)
    return lengths


def _find_steps_outside_band(deviations: np.ndarray, band: LossBand, count: int) -> np.ndarray:
    """Returns, for each step, whether it is in a window whose median is beyond the limit."""
    outside = ~np.isfinite(deviations)
    known = np.where(np.isfinite(deviations), deviations, 0.0)
    for length, limit in band.limits.items():
        if length > max(count, min(band.limits)):
            continue
        single = t_quantile(FALSE_ALARM / max(1, count / length), band.freedom)
        if length > count:  # the median of fewer steps varies more, but no more than one of them
            limit = max(single, limit)
        medians = running_medians(known[None], length)[0]
        sizes = running_medians(np.abs(known)[None], length)[0]  # B can alternate between above and below
        for start in np.flatnonzero((np.abs(medians) > limit) | (sizes > max(single, limit))):
            outside[start : start + length] = True
    return outside


def _make_verdict(steps, value, center, half, deviations, is_outside, band, name) -> Verdict:
    other = "B" if name == "A" else "A"
    facts: dict[str, Any] = {
        "steps": [int(steps[0]), int(steps[-1])],
        "compared": len(steps),
        "repeats": band.repeats,
        "largest_z": to_json_value(float(np.abs(deviations[np.isfinite(deviations)]).max(initial=0.0))),
        "step": None,
    }
    if not is_outside.any():
        sentence = (
            f"{other} stays in the band of {name} in all {len(steps)} steps from {steps[0]} to {steps[-1]}: at the end "
            f"loss {value[-1]:.5g} against {center[-1]:.5g} +- {half[-1]:.2g}."
        )
        return Verdict("losses", True, sentence, facts)
    first, last = (
        _find_step_leaving_band(deviations, is_outside),
        len(deviations) - 1 - _find_step_leaving_band(deviations[::-1], is_outside[::-1]),
    )
    # The step that shows it best, not its first one.
    show = _find_clearest_step(deviations, first, last)
    comes_back = last < len(steps) - 1 and len(steps) - 1 - last >= max(1, min(band.limits) // 2)
    end = f"was inside again after step {steps[last]}" if comes_back else "never came back"
    facts.update(step=int(steps[first]), back=int(steps[last]) if comes_back else None)
    facts.update(
        shown=int(steps[show]), loss=to_json_value(float(value[show])), center=to_json_value(float(center[show]))
    )
    facts.update(spread=half[show])
    if not np.isfinite(value[first]):
        sentence = (
            f"The loss of {other} is not finite at step {steps[first]}: {value[first]}, {name} has {center[first]:.5g}."
        )
        return Verdict("losses", False, sentence, facts)
    where = "" if show == first else f" at step {steps[show]}"
    said = f"loss {value[show]:.5g} against {center[show]:.5g} +- {half[show]:.2g}{where}"
    sentence = f"{other} left the band of {name} at step {steps[first]} and {end}: {said}."
    return Verdict("losses", False, sentence, facts)


def _find_step_leaving_band(deviations: np.ndarray, is_outside: np.ndarray) -> int:
    """Returns the index of the step at which the loss leaves the band for the first time.

    The first steps outside can still be noise. If so, returns a later step of the same stretch outside the band: the
    step from which on the rest of the stretch is hardest to explain as noise.
    """
    first = int(np.flatnonzero(is_outside)[0])
    if not np.isfinite(deviations[first]):
        return first
    end = first
    while end + 1 < len(deviations) and is_outside[end + 1] and np.isfinite(deviations[end + 1]):
        end += 1
    sizes = np.minimum(np.abs(deviations[first : end + 1]), 6.0) - 2.0
    tails = np.cumsum(sizes[::-1])[::-1]
    return first + int(np.argmax(tails))


def _find_clearest_step(deviations: np.ndarray, first: int, last: int) -> int:
    """Returns the index of the first step whose deviation is at least half of the largest one soon after `first`."""
    near = np.abs(deviations[first : min(last, first + _SHORTEST_WINDOW) + 1])
    finite = np.where(np.isfinite(near), near, 0.0)
    return first + int(np.argmax(finite >= finite.max() / 2))


def _compare_without_band(a: Losses, b: Losses) -> Verdict:
    steps, losses = align_losses([a, b])
    if not len(steps):
        raise _make_no_common_step_error(a.steps, [b])
    facts: dict[str, Any] = {
        "steps": [int(steps[0]), int(steps[-1])],
        "compared": len(steps),
        "repeats": 1,
        "step": None,
    }
    of_a, of_b = losses
    same = (of_a == of_b) | (np.isnan(of_a) & np.isnan(of_b))
    if same.all():
        return Verdict("losses", True, f"A and B have the same loss to the bit in all {len(steps)} steps.", facts)
    first = int(np.argmin(same))
    broken = np.flatnonzero(np.isfinite(of_a) != np.isfinite(of_b))
    if (not len(broken) or broken[0] > first) and _is_first_difference_beyond_rounding(
        first, steps, of_a, of_b, {a.precision, b.precision}
    ):
        facts.update(step=int(steps[first]), loss=float(of_b[first]), center=float(of_a[first]), equal_steps=first)
        sentence = (
            f"A and B differ from step {steps[first]} on: loss {of_b[first]:.5g} against {of_a[first]:.5g}. The "
            f"{first} steps before are equal bit for bit, so this is not noise. Look at what step {steps[first - 1]} "
            f"and step {steps[first]} did."
        )
        return Verdict("losses", False, sentence, facts)
    if len(broken):
        at = int(broken[0])
        facts["step"] = int(steps[at])
        sentence = f"At step {steps[at]} the loss of A is {of_a[at]:.5g} and that of B is {of_b[at]:.5g}."
        return Verdict("losses", False, sentence, facts)
    known = np.isfinite(of_a)
    if not known.any():
        raise NotComparableError("A and B have no step with a finite loss in common.")
    steps, of_a, of_b = steps[known], of_a[known], of_b[known]
    noise = max(single_step_noise(of_a), single_step_noise(of_b), _ROUNDING * float(np.abs(of_a).max()))
    length = min(_SHORTEST_WINDOW, len(steps))
    z = (of_b - of_a) / (noise * math.sqrt(2))
    far = np.abs(running_medians(z[None], length)[0]) > _FAR
    facts.update(first_difference=int(steps[min(first, len(steps) - 1)]), noise=noise)
    if len(steps) >= 2 * _SHORTEST_WINDOW and far.any():
        outside = np.zeros(len(steps), bool)
        for start in np.flatnonzero(far):
            outside[start : start + length] = True
        at = _find_step_leaving_band(z, outside)
        facts["step"] = int(steps[at])
        show = _find_clearest_step(z, at, int(np.flatnonzero(outside)[-1]))
        sentence = (
            f"B left A at step {steps[at]}: at step {steps[show]} loss {of_b[show]:.5g} against {of_a[show]:.5g}, "
            f"while the loss of one training moves by {noise:.2g} from step to step."
        )
        return Verdict("losses", False, sentence, facts)
    apart = float(np.abs(of_b - of_a).max())
    since = steps[min(first, len(steps) - 1)]
    sentence = (
        f"It cannot be told whether the losses agree: they differ from step {since} on, by at most "
        f"{apart:.2g}, and the effect of harmless differences was not measured. {_HOW_TO_GET_ONE}"
    )
    return Verdict("losses", None, sentence, facts)


def _is_first_difference_beyond_rounding(
    index: int, steps: np.ndarray, losses_a: np.ndarray, losses_b: np.ndarray, precisions: set
) -> bool:
    """Returns whether the first difference between two losses is far beyond rounding; False after constant losses.

    A rounding difference begins in the last bits and grows, perhaps by a factor of two in each unrecorded step.
    """
    if len(np.unique(losses_a[:index])) < _SHORTEST_WINDOW:  # a constant loss shows nothing
        return False
    jump = max(_JUMP.get(precision, _JUMP_OF_FLOAT32) for precision in precisions)
    gap = min(int(steps[index] - steps[index - 1]), 60)
    size = max(abs(float(losses_a[index])), abs(float(losses_b[index])), float(np.abs(losses_a[index - 1])))
    return bool(abs(losses_b[index] - losses_a[index]) > jump * 2.0 ** (gap - 1) * size)


def _make_no_common_step_error(steps_of_a: np.ndarray, runs_of_b: Sequence[Losses]) -> NotComparableError:
    ranges = " and ".join(dict.fromkeys(_format_range(run.steps) for run in runs_of_b))
    return NotComparableError(
        f"A and B have no step in common: A has losses of the steps {_format_range(steps_of_a)}, B of {ranges}."
    )


def _format_range(steps: np.ndarray) -> str:
    return f"{steps[0]} to {steps[-1]}" if len(steps) else "none"


def _folder_of_repeats(runs: Sequence[Losses]) -> str:
    return runs[0].path.rpartition("/repeat-")[0] or runs[0].path
