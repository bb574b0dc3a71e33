"""Compares variables and slots in the checkpoints of two trainings, and their updates since the first checkpoints."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from npu_bridge.base.errors import listed
from npu_bridge.reporting.history import to_json_value
from npu_run.compare.arrays import read_pieces
from npu_run.compare.checkpoint_files import SavedTensor, read_checkpoint
from npu_run.compare.names import match_operators
from npu_run.compare.sizes import UpdateSizes, compare_update_sizes, is_optimizer_slot, measure_update_sizes
from npu_run.compare.spread import t_quantile
from npu_run.compare.verdict import NotComparableError, Verdict

# Chance of a false alarm in one comparison.
_FALSE_ALARM = 1e-3
# Half a bit of float32, relative to the root mean square of a variable: the smallest spread.
_ROUNDING = 2.0**-24
# The smallest normal float32: smaller numbers count as zero and rounding of zero.
_ZERO = 2.0**-126
# Without repeats: the effect of rounding alone on a checkpoint in a few steps.
_AS_GOOD_AS_EQUAL = 1e-6
_MOST_CHECKPOINTS = 6


class VariableComparison(NamedTuple):
    """The comparison of a variable or slot in the checkpoints of A and B at a step.

    Attributes:
      name: name of the variable or slot in A.
      step: step of the checkpoints.
      distance: norm of B - A, divided by the norm of A.
      largest: largest magnitude in B - A.
      spread: distance of a repeat from the mean of the repeats, divided by the norm of A; None without repeats.
      z: `distance` divided by the standard deviation that it has if A and B differ only as repeats do; None without
        repeats.
      gain: the factor by which A must be multiplied to be closest to B.
      cosine: cosine between the updates of A and B since the first checkpoints; None at the first checkpoints, without
        an update, and for a variable that the first checkpoints lack.
      update_gain: the factor by which A's update must be multiplied to be closest to B's update; None as for `cosine`.
      not_finite: number of elements that are NaN or infinite in B but not in A.
    """

    name: str
    step: int
    distance: float
    largest: float
    spread: float | None
    z: float | None
    gain: float
    cosine: float | None
    update_gain: float | None
    not_finite: int


class _TensorsAtStep(NamedTuple):
    """The tensors in the checkpoints of all repeats of A and B at a step."""

    a: list[dict[str, SavedTensor]]
    b: list[dict[str, SavedTensor]]


def compare_checkpoints(
    a: Sequence[Mapping[int, str]], b: Sequence[Mapping[int, str]]
) -> tuple[Verdict, list[VariableComparison]]:
    """Compares the checkpoints that two trainings have in common.

    Args:
      a, b: the checkpoints of A and B: for each repeat, the paths by step, as `checkpoints_in` returns them.
    Returns:
      The verdict, and the variables at the deciding step, worst first.
    Raises:
      NotComparableError: there is no common step or variable, or a file is damaged.
    """
    steps = sorted(set(a[0]).intersection(*a, *b))
    if not steps:
        of_a, of_b = (", ".join(map(str, sorted(set().union(*side))[:6])) or "none" for side in (a, b))
        raise NotComparableError(f"The checkpoints have no step in common: A has {of_a}; B has {of_b}.")
    if len(steps) > _MOST_CHECKPOINTS:
        steps = [*steps[: _MOST_CHECKPOINTS - 1], steps[-1]]
    facts: dict[str, Any] = {"steps": steps, "repeats": max(len(a), len(b)), "variable": None, "step": None}
    notes: list[str] = []
    is_inside, sentence, found = _compare_variables_at_steps(a, b, steps, facts, notes)
    return Verdict("checkpoints", is_inside, sentence, facts, tuple(notes)), found


def _compare_variables_at_steps(
    a, b, steps, facts: dict, notes: list[str]
) -> tuple[bool | None, str, list[VariableComparison]]:
    """Decides whether the checkpoints at `steps` agree; also returns a sentence, and the variables, worst first.

    Fills in `facts`, and `notes` on the last step that was compared.
    """
    found: list[VariableComparison] = []
    start: _TensorsAtStep | None = None
    for step in steps:
        files = _read_checkpoints_at(a, b, step)
        # Anew for each step: before the first update, a checkpoint of Keras has no slots.
        name_pairs, notes[:], problem = _match_variables(files)
        if problem:
            return False, problem, []
        limit = t_quantile(_FALSE_ALARM / len(name_pairs), facts["repeats"] - 1) if facts["repeats"] > 1 else math.inf
        found = [_compare_variable(name, other, step, files, start) for name, other in name_pairs.items()]
        start = start or files
        found.sort(key=lambda one: (-one.not_finite, -(one.distance if one.z is None else one.z)))
        outside = [one for one in found if one.not_finite or (one.z is not None and one.z > limit)]
        if limit == math.inf and step == steps[0] and _are_most_variables_equal(found):
            outside = [one for one in found if one.distance > 0]
        if outside:
            break
    facts.update(variables=[{name: to_json_value(value) for name, value in one._asdict().items()} for one in found])
    worst = found[0]
    if outside:
        facts.update(variable=worst.name, step=worst.step)
        return False, _describe_worst_variable(found, outside, steps), found
    if limit < math.inf and len(steps) > 1:
        stretch = max(zip(steps, steps[1:]), key=lambda pair: pair[1] - pair[0])
        sizes = _compare_update_sizes(a, b, stretch, name_pairs)
        facts.update(sizes=None if sizes is None else sizes.as_json_facts())
        if sizes is not None and not sizes.do_sizes_agree:
            facts.update(step=stretch[1])
            return False, _describe_sizes(sizes, stretch), found
    said = f"{len(found)} variables and slots at steps {', '.join(map(str, steps))}"
    if limit < math.inf:
        spread = f"within the spread of the repeats, {worst.name} by {worst.z:.2g} of {limit:.2g}"
        return True, f"{said} are {spread}.", found
    if worst.distance <= _AS_GOOD_AS_EQUAL:
        how = "equal to the bit" if worst.distance == 0 else "equal but for rounding"
        return True, f"{said} are {how}.", found
    sentence = (
        f"It cannot be told whether the checkpoints agree: at step {worst.step} {worst.name} is {worst.distance:.2g} "
        f"of its norm away, and the effect of harmless differences was not measured; train A several times with "
        f"npu-run --repeat 3."
    )
    return None, sentence, found


def _read_checkpoints_at(a, b, step: int) -> _TensorsAtStep:
    return _TensorsAtStep(*([read_checkpoint(run[step]) for run in side] for side in (a, b)))


def _match_variables(files: _TensorsAtStep) -> tuple[dict[str, str], list[str], str]:
    """Returns pairs of names (A to B), notes on unmatched names, and a sentence on different shapes or ""."""
    of_a, of_b = (
        [name for name, one in side[0].items() if _has_float_values(one) and all(name in run for run in side)]
        for side in (files.a, files.b)
    )
    matching = match_operators(of_a, of_b)
    alone_a, alone_b = matching.only_a, matching.only_b
    names, guesses, notes, problem = {}, [], [], ""
    for name, other in matching.pairs.items():
        how = matching.how.get(name)
        if how == "fused":
            continue
        is_same_shape = len({one[name].shape for one in files.a} | {one[other].shape for one in files.b}) == 1
        if how == "scope" and not is_same_shape:  # such a match is a guess, which the shapes have to confirm
            alone_a.append(name)
            alone_b.append(other)
            continue
        names[name] = other
        guesses += [f"{name} = {other}"] if how == "scope" else []
        if not is_same_shape and not problem:
            x, y = files.a[0][name].shape, files.b[0][other].shape
            problem = f"{name} has the shape {list(x)} in A and {list(y)} in B: these are different models."
    for found, said in (
        (alone_a, "variables or slots are in A, but not in every repeat of B"),
        (alone_b, "variables or slots are in B, but not in every repeat of A"),
        (guesses, "were matched by the end of their names"),
    ):
        if found:
            notes.append(f"{len(found)} {said}: {listed(found, 4)}.")
    if not names:
        raise NotComparableError(f"The checkpoints have no variable in common: A has {of_a[:3]}, B has {of_b[:3]}.")
    if len(names) < min(len(alone_a), len(alone_b)):
        raise NotComparableError(
            f"The checkpoints are of different models: they share {len(names)} variables, {len(alone_a)} are only "
            f"in A, such as {alone_a[0]}, and {len(alone_b)} only in B, such as {alone_b[0]}."
        )
    return names, notes, problem


def _has_float_values(tensor: SavedTensor) -> bool:
    return "float" in tensor.computed_dtype and tensor.size > 0


def _compare_variable(
    name_in_a: str, name_in_b: str, step: int, files: _TensorsAtStep, start: _TensorsAtStep | None
) -> VariableComparison:
    arrays = [one[name_in_a] for one in files.a] + [one[name_in_b] for one in files.b]
    count_a, count_b = len(files.a), len(files.b)
    has_start = start is not None and name_in_a in start.a[0] and name_in_b in start.b[0]
    if has_start:
        arrays += [start.a[0][name_in_a], start.b[0][name_in_b]]
    sums = np.zeros(7)  # a a, a b, |b - a|^2, spread^2, u u, u v, v v
    largest, bad = 0.0, 0
    for pieces in zip(*map(read_pieces, arrays)):
        values = np.array([piece.astype(np.float64) for piece in pieces])
        finite = np.isfinite(values)
        bad += int((finite[:count_a].all(axis=0) & ~finite[count_a : count_a + count_b].all(axis=0)).sum())
        values = values[:, finite.all(axis=0)]
        of_a, of_b = values[:count_a], values[count_a : count_a + count_b]
        x, y = of_a.mean(axis=0), of_b.mean(axis=0)
        apart = y - x
        repeats = (of_a - x) if count_a > 1 else (of_b - y)
        sums[:4] += x @ x, x @ y, apart @ apart, (repeats**2).sum()
        largest = max(largest, float(np.abs(apart).max(initial=0.0)))
        if has_start:
            u, v = x - values[-2], y - values[-1]
            sums[4:] += u @ u, u @ v, v @ v
    norm = math.sqrt(sums[0])
    many = max(count_a, count_b)
    distance = _safe_ratio(math.sqrt(sums[2]), norm)
    spread = z = None
    if many > 1:
        least = (_ROUNDING * norm) ** 2 + arrays[0].size * _ZERO**2
        around = math.sqrt(sums[3] / (many - 1) + least)
        z = _safe_ratio(math.sqrt(sums[2]), around * math.sqrt(1 / count_a + 1 / count_b))
        spread = _safe_ratio(around, norm)
    has_moved = sums[4] > 0 and sums[6] > 0
    return VariableComparison(
        *(name_in_a, step, distance, largest, spread, z, float(sums[1] / sums[0]) if sums[0] else 1.0),
        float(sums[5] / math.sqrt(sums[4] * sums[6])) if has_moved else None,
        float(sums[5] / sums[4]) if has_moved else None,
        bad,
    )


def _compare_update_sizes(a, b, step_range: tuple[int, int], names: Mapping[str, str]) -> UpdateSizes | None:
    """Compares the sizes of A's and B's updates between two steps, for variables that change in every repeat."""
    moved: list[list[dict[str, np.ndarray | None]]] = []
    for side, of_b in ((a, False), (b, True)):
        moved.append([])
        for run in side:
            before, after = (read_checkpoint(run[step]) for step in step_range)
            own_names = {name: other if of_b else name for name, other in names.items()}
            moved[-1].append(
                {
                    name: measure_update_sizes(before[own], after[own])
                    for name, own in own_names.items()
                    if own in before and own in after and not is_optimizer_slot(own, before)
                }
            )
    every = [run for side in moved for run in side]
    common = [name for name in names if all(run.get(name) is not None for run in every)]
    return compare_update_sizes(*([[run[name] for name in common] for run in side] for side in moved), _FALSE_ALARM)


def _describe_sizes(sizes: UpdateSizes, step_range: tuple[int, int]) -> str:
    how_far = f"{math.exp(sizes.apart):.3g} times as far as A between steps {step_range[0]} and {step_range[1]}"
    spread, limit = _format_log_as_percent(sizes.spread), _format_log_as_percent(sizes.limit)
    noise = f"repeats differ by {spread}, and up to {limit} is noise with so few of them"
    return f"All variables together, B went {how_far}; {noise}. Another learning rate has this effect."


def _format_log_as_percent(logarithm: float) -> str:
    return f"{100 * math.expm1(logarithm):.2g} %"


def _safe_ratio(number: float, divisor: float) -> float:
    return number / divisor if divisor else math.inf if number else 0.0


def _are_most_variables_equal(variables: Sequence[VariableComparison]) -> bool:
    """Returns whether most variables are equal bit for bit but some are not."""
    differ = sum(one.distance > _AS_GOOD_AS_EQUAL for one in variables)
    return 0 < differ < len(variables) / 2 and all(
        one.distance == 0 or one.distance > _AS_GOOD_AS_EQUAL for one in variables
    )


def _describe_worst_variable(
    variables: Sequence[VariableComparison], outside: Sequence[VariableComparison], steps: Sequence[int]
) -> str:
    worst = variables[0]
    many = f"{len(outside)} of {len(variables)} variables and slots differ"
    if worst.not_finite:
        return (
            f"{worst.name} has {worst.not_finite} elements that are not finite in B alone at step {worst.step}; {many}."
        )
    said = f"{worst.name} differs at step {worst.step}: {worst.distance:.2g} of its norm away"
    if worst.z is not None:
        said += f", {worst.z:.2g} times the spread of the repeats"
    if abs(worst.gain - 1) > 10 * (worst.spread or 0) and worst.distance < 1.05 * abs(worst.gain - 1):
        said += f", B is {worst.gain:.6g} times A"
    elif worst.cosine is not None and worst.update_gain is not None:
        said += f", its update is {worst.update_gain:.6g} times that of A with a cosine of {worst.cosine:.6f}"
    if worst.step == steps[0] and len(steps) > 1:
        said += ", already in the first checkpoint"
    return f"{said}; {many}."
