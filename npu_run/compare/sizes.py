"""Compares the sizes of two trainings' updates between two checkpoints, for repeats that begin with different weights.

Of trainings with different seeds only the sizes of updates can be compared. A learning rate that is too large shows in
all variables together, but is lost in the noise of a single variable. So the logarithm of an update's size is measured
in parts of variables, parts in which repeats differ more get less weight, and the weighted means are compared.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from npu_run.compare.arrays import StoredArray, read_pieces
from npu_run.compare.checkpoint_files import SavedTensor
from npu_run.compare.spread import t_quantile

# The most parts of a variable, the least elements of a part, and the fewest parts of a variable that counts.
_MOST_PARTS, _PART, _FEWEST_PARTS = 16, 16, 4
# Three repeats show little about how much whole trainings differ. So the variance of their mean under independent
# parts, times the first factor, or under independent variables, times the second, counts like this many more repeats
# (ours; measured on trainings of the models in benchmarks/compare.py).
_OVER_PARTS, _OVER_VARIABLES, _MORE_REPEATS = 3.0, 1.5, 6
# The limit is at least this many times the spread of whole repeats, and at least this large.
_FEWEST_SPREADS, _LEAST = 4.0, 0.05
_ROUNDING = 2.0**-24


class UpdateSizes(NamedTuple):
    """The size of B's updates relative to A's; all fields except `parts` are logarithms.

    Attributes:
      apart: the size of B's updates divided by the size of A's updates.
      spread: standard deviation of the size of a repeat's updates.
      limit: the largest magnitude of `apart` that still counts as noise.
      parts: number of parts of variables.
    """

    apart: float
    spread: float
    limit: float
    parts: int

    @property
    def do_sizes_agree(self) -> bool:
        """Whether the sizes of A's and B's updates agree."""
        return abs(self.apart) <= self.limit

    def as_json_facts(self) -> dict[str, Any]:
        """Returns the fields for JSON, with the factor itself in addition to its logarithm."""
        return {**self._asdict(), "factor": math.exp(self.apart)}


def is_optimizer_slot(name: str, all_tensors: Mapping[str, StoredArray]) -> bool:
    """Returns whether a tensor is an optimizer's slot, whose size and unit differ from those of weights."""
    parent = all_tensors.get(name.rpartition("/")[0])
    return ".OPTIMIZER_SLOT" in name or (parent is not None and parent.shape == all_tensors[name].shape)


def measure_update_sizes(before: StoredArray | SavedTensor, after: StoredArray | SavedTensor) -> np.ndarray | None:
    """Cuts a variable's update into parts, and computes the logarithm of each part's root mean square.

    Returns:
      The logarithms; None if the variable has too few elements, or a part does not change or is not finite.
    """
    parts = min(_MOST_PARTS, after.size // _PART)
    if parts < _FEWEST_PARTS:
        return None
    sums, done = np.zeros(parts), 0
    for old, new in zip(read_pieces(before), read_pieces(after)):
        step = new.astype(np.float64) - old.astype(np.float64)
        at = np.arange(done, done + len(step)) * parts // after.size
        sums += np.bincount(at, step * step, parts)
        done += len(step)
    if not (np.isfinite(sums) & (sums > 0)).all():
        return None
    return 0.5 * np.log(sums * parts / after.size)


def compare_update_sizes(
    a: Sequence[Sequence[np.ndarray]], b: Sequence[Sequence[np.ndarray]], false_alarm_chance: float
) -> UpdateSizes | None:
    """Compares the sizes of updates of two trainings.

    Args:
      a, b: for each repeat and each variable the result of `measure_update_sizes`; A or B has at least two repeats.
      false_alarm_chance: chance of a false alarm.
    Returns:
      The comparison; None without variables.
    """
    if not a[0]:
        return None
    variable = np.repeat(np.arange(len(a[0])), [len(parts) for parts in a[0]])
    of_a, of_b = (np.array([np.concatenate(run) for run in side]) for side in (a, b))
    repeats = of_a if len(of_a) > 1 else of_b
    freedom = len(repeats) - 1
    noise = repeats - repeats.mean(axis=0)
    variance = np.bincount(variable, (noise**2).sum(axis=0)) / np.bincount(variable) / freedom
    variance = np.maximum(variance, _ROUNDING**2)
    weight = 1 / variance[variable]
    weight /= weight.sum()
    of_variables = np.array([np.bincount(variable, run * weight) for run in noise])
    seen = float((of_variables.sum(axis=1) ** 2).sum() / freedom)
    expected = max(
        _OVER_PARTS * float(weight**2 @ variance[variable]), _OVER_VARIABLES * float((of_variables**2).sum() / freedom)
    )
    pooled = (freedom * seen + _MORE_REPEATS * expected) / (freedom + _MORE_REPEATS)
    limit = max(
        math.sqrt(pooled) * t_quantile(false_alarm_chance, freedom + _MORE_REPEATS), _FEWEST_SPREADS * math.sqrt(seen)
    )
    limit *= math.sqrt(1 / len(a) + 1 / len(b))
    apart = float((of_b.mean(axis=0) - of_a.mean(axis=0)) @ weight)
    return UpdateSizes(apart, math.sqrt(seen), max(limit, _LEAST), len(weight))
