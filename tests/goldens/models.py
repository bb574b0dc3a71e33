"""Stages and loss scales in numpy, written from docs/stages*.md, for any chain that has an order."""

from __future__ import annotations

import math
import re
from typing import NamedTuple

import numpy as np

from npu_bridge.gradients.stages.freeze_schedule import FreezeSchedule


class After(NamedTuple):
    """The state after a step.

    Attributes:
      values: variables by name, a dict for each rank.
      scales: the loss scales that the step used.
      is_bad: a gradient was not finite, so the step has no update.
      updates: the number of updates so far.
      frozen: names of the variables that the step did not train.
      alike: names of the variables that are the same on all ranks.
    """

    values: list
    scales: tuple
    is_bad: bool
    updates: int
    frozen: tuple
    alike: tuple


class Trained(NamedTuple):
    """The state after training.

    Attributes:
      trace: an `After` for each step.
      slots: momenta by name, a dict for each rank.
      residuals: unsent values, likewise; empty if none are kept.
      sums: summed gradients of an unfinished window, likewise; empty without `Accumulate`.
    """

    trace: list
    slots: list
    residuals: list
    sums: list


class _Grads(NamedTuple):
    """Gradients of one rank or of all: dense arrays by name, and the rows of the table that they have."""

    of: dict
    rows: np.ndarray

    def map(self, change):
        """Changes every value; missing rows stay zero."""
        changed = {name: change(grad) for name, grad in self.of.items()}
        if "table" in changed:
            changed["table"] = np.where(self.rows[:, np.newaxis], changed["table"], 0.0)
        return _Grads(changed, self.rows)

    def without(self, names):
        """Replaces the gradients of some variables by zeros without rows."""
        of = {name: np.zeros_like(grad) if name in names else grad for name, grad in self.of.items()}
        return _Grads(of, self.rows & ("table" not in names))

    def plus(self, other, share=1):
        """Adds a share of other gradients."""
        return _Grads({name: self.of[name] + other.of[name] / share for name in self.of}, self.rows | other.rows)


class _Scale:
    """A loss scale in float32."""

    def __init__(self, first, every, growth=2.0, backoff=0.5):
        self.value, self._good, self._every = np.float32(first), 0, every
        self._growth, self._backoff = np.float32(growth), np.float32(backoff)

    def move(self, is_bad):
        """Updates the scale after a step, or a window."""
        self._good = 0 if is_bad else self._good + 1
        if is_bad:
            self.value = self.value * self._backoff
        elif self._good == self._every:
            self.value, self._good = self.value * self._growth, 0


def in_numpy(golden, rank_count):
    """Trains with the problem's feeds for each rank; returns a `Trained`."""
    problem, stages = golden.problem, {table["stage"]: table for table in golden.stages}
    fed = [problem.fed_to(rank) for rank in range(rank_count)]
    start = {name: value.astype(np.float64) for name, value in problem.start_values().items()}
    values = [dict(start) for _ in fed]
    slots = [{name: np.zeros_like(value) for name, value in start.items()} for _ in fed]
    dense = [name for name in start if name != "table"]
    residuals = [{name: np.zeros_like(start[name]) for name in dense if _has_feedback(stages, rank_count)} for _ in fed]
    nothing = _Grads({name: np.zeros_like(value) for name, value in start.items()}, np.zeros(6, bool))
    nothing = nothing if "table" in start else _Grads(nothing.of, np.zeros(0, bool))
    scales = [_Scale(*rule) for rule in golden.scales]
    window = stages.get("Accumulate", {"steps": 1})
    is_by_batch = "exchange" in window or "loss_scale" in window
    share = 1 if window.get("reduction") == "sum" else window["steps"]
    partitions = _partitions(start, stages["PartialSync"]["threshold"]) if "PartialSync" in stages else [tuple(start)]
    sums, count, is_void, updates, trace = [[nothing] * len(scales) for _ in fed], 0, False, 0, []
    for step in range(problem.steps):
        used, frozen, is_bad = tuple(scale.value for scale in scales), _frozen(stages, updates, start), False
        grads = [problem.gradients_of(of_rank, fed_here[step]) for of_rank, fed_here in zip(values, fed)]
        batch = [[_Grads(*part).without(frozen) for part in golden.parts_of(of_rank)] for of_rank in grads]
        if is_by_batch:
            is_bad = _judged(batch, scales)
        if not is_bad or "loss_scale" in window:
            count, is_void = count + 1, is_void or is_bad
            sums = [[kept.plus(part, share) for kept, part in zip(*of_rank)] for of_rank in zip(sums, batch)]
        if count == window["steps"]:
            local, sums, count = sums, [[nothing] * len(scales) for _ in fed], 0
            if "ClipLocally" in stages:
                local = [[_clipped(part, stages["ClipLocally"]) for part in parts] for parts in local]
            if not is_by_batch:
                is_bad = _judged(local, scales)
            if not (is_bad or is_void):
                _updated(golden, stages, [_sum(parts) for parts in local], values, slots, residuals, frozen)
                if "PartialSync" in stages:
                    _synchronise(values, partitions[updates % len(partitions)])
                updates += 1
            is_void = False
        alike = partitions[(updates - 1) % len(partitions)]
        trace.append(After([dict(of_rank) for of_rank in values], used, is_bad, updates, frozen, alike))
    kept = [_sum(parts).of if "Accumulate" in stages else {} for parts in sums]
    return Trained(trace, slots, residuals, kept)


def _judged(of_ranks, scales):
    """Moves each scale by its part of the gradients of all ranks; returns whether any was not finite."""
    bad = [not all(map(_is_usable, parts)) for parts in zip(*of_ranks)]
    for scale, is_bad in zip(scales, bad):
        scale.move(is_bad)
    return any(bad)


def _sum(parts):
    total = parts[0]
    for part in parts[1:]:
        total = total.plus(part)
    return total


def _updated(golden, stages, local, values, slots, residuals, frozen):
    """Changes the values, slots and kept values of each rank."""
    before = [dict(of_rank) for of_rank in values]
    for rank, grads in enumerate(_combined(stages, local, residuals, frozen)):
        _update(golden, values[rank], slots[rank], _of_reduced(stages, grads, frozen), frozen)
    if _is_of_weights(stages):
        for name in values[0]:
            deltas = [old[name] - new[name] for old, new in zip(before, values)]
            combined = adasum_tree(deltas[:: _averaged_ranks(stages, len(values))])
            for old, new in zip(before, values):
                new[name] = old[name] - combined


def _synchronise(values, names):
    for name in names:
        mean = np.mean([of_rank[name] for of_rank in values], axis=0)
        for of_rank in values:
            of_rank[name] = mean.copy()


def _has_feedback(stages, rank_count):
    """Returns whether ranks keep a rest; a gradient that is sent as a whole leaves none."""
    if "TopK" in stages and stages["TopK"]["density"] * rank_count >= 1:
        return False
    feedback = [stages[name].get("error_feedback", True) for name in ("TopK", "Threshold") if name in stages]
    return rank_count > 1 and any(feedback)


def _frozen(stages, updates, names):
    """Returns the variables that this update does not train: those of the parts before the part of its number."""
    if "Freeze" not in stages:
        return ()
    schedule = FreezeSchedule.of(stages["Freeze"]["schedule"])
    group = schedule.sequence[updates % len(schedule.sequence)]
    patterns = [pattern for part in stages["Freeze"]["schedule"]["groups"][:group] for pattern in part]
    return tuple(name for name in names if any(re.search(pattern, name) for pattern in patterns))


def _clipped(grads, options):
    """Clips finite values to the bounds; others stay unchanged."""
    high = options.get("high", options["low"])
    low = options["low"] if "high" in options else -high
    return grads.map(lambda grad: np.where(np.isfinite(grad), np.clip(grad, low, high), grad))


def _is_usable(grads):
    """Returns whether half the square of the norm is a finite float32."""
    with np.errstate(invalid="ignore", over="ignore"):
        half = sum(np.sum(np.square(grad)) for grad in grads.of.values()) / 2
    return bool(half <= np.finfo(np.float32).max)  # False for NaN


def _combined(stages, local, residuals, frozen):
    """Returns the gradients that each rank applies."""
    if "PartialSync" in stages:
        return local
    if "Adasum" in stages:
        size = _averaged_ranks(stages, len(local))
        means = [_combined_by(_mean, local[first : first + size]) for first in range(0, len(local), size)]
        if _is_of_weights(stages):
            return [mean for mean in means for _ in range(size)]
        return [_combined_by(adasum_tree, means)] * len(local)
    sparse = next((stages[name] for name in ("TopK", "Threshold") if name in stages), None)
    is_dense = sparse is None or len(local) == 1 or sparse.get("density", 0) * len(local) >= 1
    if not is_dense:
        local = [_sent(sparse, grads, residual, frozen) for grads, residual in zip(local, residuals)]
    return [_combined_by(_mean, local)] * len(local)


def _mean(grads):
    return np.mean(grads, axis=0)


def _combined_by(combine, of_ranks):
    rows = np.any([grads.rows for grads in of_ranks], axis=0)
    return _Grads({name: combine([grads.of[name] for grads in of_ranks]) for name in of_ranks[0].of}, rows)


def _averaged_ranks(stages, rank_count):
    averaged = stages["Adasum"].get("averaged_ranks", 1)
    return rank_count if averaged == "host" else min(averaged, rank_count)


def _is_of_weights(stages):
    return stages.get("Adasum", {}).get("on") == "weights"


def _sent(options, grads, residual, frozen):
    """Returns the part of its dense gradients that one rank sends; changes the part that it keeps."""
    dense = [name for name in grads.of if name != "table" and name not in frozen]
    wanted = {name: grads.of[name] + residual.get(name, 0.0) for name in dense}
    flat = {name: value.ravel() for name, value in wanted.items()}
    if "value" in options:
        chosen = {name: np.abs(vector) >= options["value"] for name, vector in flat.items()}
    elif options.get("per") == "fragment":
        of_all = _largest(np.concatenate(list(flat.values())), options["density"])
        chosen = dict(zip(flat, np.split(of_all, np.cumsum([vector.size for vector in flat.values()])[:-1])))
    else:
        chosen = {name: _largest(vector, options["density"]) for name, vector in flat.items()}
    sent = {name: np.where(chosen[name].reshape(value.shape), value, 0) for name, value in wanted.items()}
    residual.update({name: wanted[name] - sent[name] for name in residual})
    return _Grads({**grads.of, **sent}, grads.rows)


def _largest(vector, density):
    """Marks the values with the largest magnitudes; the first of equal ones."""
    chosen = np.zeros(vector.size, bool)
    chosen[np.argsort(-np.abs(vector), kind="stable")[: math.ceil(density * vector.size)]] = True
    return chosen


def adasum_tree(grads):
    """Computes Adasum of one variable's gradients, in pairs of neighbours, pairs of pairs and so on."""
    while len(grads) > 1:
        grads = [
            sum(((1 - np.sum(a * b) / (2 * np.sum(x * x))) * x for x in (a, b) if x.any()), np.zeros_like(a))
            for a, b in zip(grads[::2], grads[1::2])
        ]
    return grads[0]


def _of_reduced(stages, grads, frozen):
    if "ClipByValue" in stages:
        grads = _clipped(grads, stages["ClipByValue"])
    if "ClipByGlobalNorm" in stages:
        bound = stages["ClipByGlobalNorm"]["clip_norm"]
        trained = grads.of.keys() - set(frozen)  # what is left out has no gradient, also where the least value is not 0
        norm = np.sqrt(sum(np.sum(np.square(grads.of[name])) for name in trained))
        grads = grads.map(lambda grad: grad * min(1.0, bound / max(norm, 1e-300)))
    # Gradients of vectors, and sparse ones, stay unchanged.
    if "CentralizeGradients" in stages and "kernel" not in stages["CentralizeGradients"].get("skip", ()):
        kernel = grads.of["kernel"]
        grads = _Grads({**grads.of, "kernel": kernel - kernel.mean(axis=0, keepdims=True)}, grads.rows)
    return grads


def _update(golden, values, slots, grads, frozen):
    """Updates as TensorFlow's momentum optimizer: for a sparse gradient, only the rows that it has."""
    for name in grads.of.keys() - set(frozen):
        grad = grads.of[name]
        there = np.broadcast_to(grads.rows[:, np.newaxis] if name == "table" else True, grad.shape)
        slots[name] = np.where(there, golden.momentum * slots[name] + grad, slots[name])
        values[name] = values[name] - np.where(there, golden.rate * slots[name], 0.0)


def _partitions(values, threshold):
    """Cuts from the last variable on: a large one alone, small ones together until they exceed the threshold."""
    cut, together = [], []
    for name in reversed(values):
        if values[name].size > threshold:
            cut.append((name,))
            continue
        together.append(name)
        if sum(values[other].size for other in together) > threshold:
            cut, together = [*cut, tuple(together)], []
    return [*cut, tuple(together)] if together else cut
