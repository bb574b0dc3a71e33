"""What stages do with gradients, in numpy: written from docs/stages*.md, for any chain that has an order."""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np

STEPS, LEARNING_RATE, FIRST_SCALE, GROWS_EVERY = 51, 0.1, 2.0**10, 4
WINDOW = 3
SHAPES = {"kernel": (4, 3), "vector": (3,), "table": (6, 2)}
DENSE = ("kernel", "vector")  # of the table gradients are rows
# Tables of stages as `stages.from_config` takes them, by short names.
TABLES = {
    "accumulate": {"stage": "Accumulate", "steps": WINDOW},
    "accumulate sums": {"stage": "Accumulate", "steps": WINDOW, "reduction": "sum"},
    "clip locally": {"stage": "ClipLocally", "low": -0.5, "high": 0.75},
    "clip by value": {"stage": "ClipByValue", "low": 0.4},
    "clip by norm": {"stage": "ClipByGlobalNorm", "clip_norm": 1.5},
    "centralise": {"stage": "CentralizeGradients"},
    "top k": {"stage": "TopK", "density": 0.3},
    "top k, forgetful": {"stage": "TopK", "density": 0.3, "error_feedback": False},
    "top k of a fragment": {"stage": "TopK", "density": 0.3, "per": "fragment"},
    "threshold": {"stage": "Threshold", "value": 0.8},
    "adasum": {"stage": "Adasum"},
    "adasum of means": {"stage": "Adasum", "averaged_ranks": 2},
    "adasum of hosts": {"stage": "Adasum", "averaged_ranks": "host"},
    "adasum of weights": {"stage": "Adasum", "on": "weights"},
    "adasum of weights, of means": {"stage": "Adasum", "averaged_ranks": 2, "on": "weights"},
    "partial sync": {"stage": "PartialSync", "threshold": 12},
    "freeze": {
        "stage": "Freeze",
        "schedule": {"groups": [["table"], ["kernel"], ["vector"]], "kind": "explicit", "sequence": [0, 1, 2, 1]},
    },
}
# At most one of these: each keeps ranks together by itself.
SYNCHRONISING = ("TopK", "Threshold", "Adasum", "PartialSync")
NOT_FINITE = {(7, 0): ("kernel", np.inf), (20, 1): ("kernel", np.nan), (38, 0): ("kernel", np.nan)}


def tables_of(chain):
    """A chain of short names, or of tables, as tables."""
    return [TABLES[item] if isinstance(item, str) else item for item in chain]


def gradients_of(rank, steps=STEPS, seed=0, bad=NOT_FINITE):
    """One dict of gradients per step; those of the table are rows with repeated indices.

    Args:
      bad: by (step, rank) the name of a gradient and what one of its values is replaced by.
    """
    random = np.random.RandomState([seed, rank] if seed else rank)
    fed = []
    for step in range(steps):
        grads = {name: random.randn(*shape).astype(np.float32) for name, shape in SHAPES.items()}
        grads["rows"] = random.randint(0, 6, 5)
        grads["table"] = random.randn(5, 2).astype(np.float32)
        fed.append(grads)
        if (step, rank) in bad:
            name, value = bad[step, rank]
            grads[name].flat[4 % grads[name].size] = value
    return fed


def start_values():
    """What the variables are before the first step."""
    random = np.random.RandomState(100)
    return {name: random.randn(*shape).astype(np.float32) for name, shape in SHAPES.items()}


class Trained(NamedTuple):
    """What is left after training.

    Attributes:
      values: variables by name, a dict for each rank.
      slots: the same of momenta.
      residuals: the same of what was not sent; empty where nothing is kept.
      sums: the same of gradients of a window that has not ended, empty without `Accumulate`.
      scales: the loss scale before each step.
      updates: how many there were.
      alike: names of the variables that are the same on all ranks.
    """

    values: list
    slots: list
    residuals: list
    sums: list
    scales: list
    updates: int
    alike: tuple


class _Grads(NamedTuple):
    """Gradients of one rank or of all: dense arrays by name, and which rows of the table they have."""

    of: dict
    rows: np.ndarray

    def map(self, change):
        """Changes every value that there is; rows that are not there stay zero."""
        changed = {name: change(grad) for name, grad in self.of.items()}
        changed["table"] = np.where(self.rows[:, np.newaxis], changed["table"], 0.0)
        return _Grads(changed, self.rows)


def in_numpy(chain, rank_count, fed=None, momentum=0.0):
    """Trains with what is fed to each rank, by default `gradients_of`; gives a `Trained`."""
    stages = {table["stage"]: table for table in tables_of(chain)}
    fed = [gradients_of(rank) for rank in range(rank_count)] if fed is None else fed
    values = [{name: value.astype(np.float64) for name, value in start_values().items()} for _ in fed]
    slots = [{name: np.zeros(shape) for name, shape in SHAPES.items()} for _ in fed]
    residuals = [{name: np.zeros(SHAPES[name]) for name in DENSE if _has_feedback(stages, rank_count)} for _ in fed]
    window = stages["Accumulate"]["steps"] if "Accumulate" in stages else 1
    partitions = _partitions(stages["PartialSync"]["threshold"]) if "PartialSync" in stages else [tuple(SHAPES)]
    sums = [_nothing() for _ in fed]
    scale, good, updates, scales = FIRST_SCALE, 0, 0, []
    for step in range(len(fed[0])):
        scales.append(scale)
        frozen = _frozen(stages, updates)
        sums = [_added(kept, _summed_rows(batches[step], frozen), stages) for kept, batches in zip(sums, fed)]
        if (step + 1) % window:
            continue
        local, sums = sums, [_nothing() for _ in fed]
        if "ClipLocally" in stages:
            local = [_clipped(grads, stages["ClipLocally"]) for grads in local]
        if not all(map(_is_usable, local)):
            scale, good = scale / 2, 0
            continue
        good += 1
        scale, good = (scale * 2, 0) if good == GROWS_EVERY else (scale, good)
        before = [dict(of_rank) for of_rank in values]
        for rank, grads in enumerate(_combined(stages, local, residuals, frozen)):
            _update(values[rank], slots[rank], _of_reduced(stages, grads, frozen), momentum, frozen)
        if _is_of_weights(stages):
            for name in SHAPES:
                deltas = [old[name] - new[name] for old, new in zip(before, values)]
                combined = adasum_tree(deltas[:: _averaged_ranks(stages, rank_count)])
                for old, new in zip(before, values):
                    new[name] = old[name] - combined
        if "PartialSync" in stages:
            for name in partitions[updates % len(partitions)]:
                mean = np.mean([of_rank[name] for of_rank in values], axis=0)
                for of_rank in values:
                    of_rank[name] = mean.copy()
        updates += 1
    alike = partitions[(updates - 1) % len(partitions)]
    kept = [grads.of if "Accumulate" in stages else {} for grads in sums]
    return Trained(values, slots, residuals, kept, scales, updates, alike)


def _has_feedback(stages, rank_count):
    """What is sent as a whole leaves nothing behind."""
    if "TopK" in stages and stages["TopK"]["density"] * (rank_count - 1) >= 1:
        return False
    feedback = [stages[name].get("error_feedback", True) for name in ("TopK", "Threshold") if name in stages]
    return rank_count > 1 and any(feedback)


def _nothing():
    return _Grads({name: np.zeros(shape) for name, shape in SHAPES.items()}, np.zeros(6, bool))


def _frozen(stages, updates):
    """Names of the variables that this update does not train: those of the parts before that of its number."""
    if "Freeze" not in stages:
        return ()
    schedule = stages["Freeze"]["schedule"]
    group = schedule["sequence"][updates % len(schedule["sequence"])]
    return tuple(name for part in schedule["groups"][:group] for name in part)


def _summed_rows(grads, frozen):
    """Dense gradients; of what is frozen zeros, and no rows."""
    table, rows = np.zeros(SHAPES["table"]), np.zeros(6, bool)
    if "table" not in frozen:
        np.add.at(table, grads["rows"], grads["table"])
        rows[grads["rows"]] = True
    dense = {name: np.zeros(SHAPES[name]) if name in frozen else grads[name].astype(np.float64) for name in DENSE}
    return _Grads({**dense, "table": table}, rows)


def _added(kept, grads, stages):
    options = stages.get("Accumulate", {"steps": 1})
    share = 1 if options.get("reduction") == "sum" else options["steps"]
    return _Grads({name: kept.of[name] + grads.of[name] / share for name in SHAPES}, kept.rows | grads.rows)


def _clipped(grads, options):
    """Finite values between the bounds; others stay what they are."""
    high = options.get("high", options["low"])
    low = options["low"] if "high" in options else -high
    return grads.map(lambda grad: np.where(np.isfinite(grad), np.clip(grad, low, high), grad))


def _is_usable(grads):
    """Half the square of the norm is a finite float32."""
    with np.errstate(invalid="ignore", over="ignore"):
        half = sum(np.sum(np.square(grad)) for grad in grads.of.values()) / 2
    return bool(half <= np.finfo(np.float32).max)  # False for NaN


def _combined(stages, local, residuals, frozen):
    """What each rank goes on with."""
    if "PartialSync" in stages:
        return local
    if "Adasum" in stages:
        size = _averaged_ranks(stages, len(local))
        means = [_combined_by(_mean, local[first : first + size]) for first in range(0, len(local), size)]
        if _is_of_weights(stages):
            return [mean for mean in means for _ in range(size)]
        return [_combined_by(adasum_tree, means)] * len(local)
    sparse = next((stages[name] for name in ("TopK", "Threshold") if name in stages), None)
    is_dense = sparse is None or len(local) == 1 or sparse.get("density", 0) * (len(local) - 1) >= 1
    if not is_dense:
        local = [_sent(sparse, grads, residual, frozen) for grads, residual in zip(local, residuals)]
    return [_combined_by(_mean, local)] * len(local)


def _mean(grads):
    return np.mean(grads, axis=0)


def _combined_by(combine, of_ranks):
    rows = np.any([grads.rows for grads in of_ranks], axis=0)
    return _Grads({name: combine([grads.of[name] for grads in of_ranks]) for name in SHAPES}, rows)


def _averaged_ranks(stages, rank_count):
    averaged = stages["Adasum"].get("averaged_ranks", 1)
    return rank_count if averaged == "host" else min(averaged, rank_count)


def _is_of_weights(stages):
    return stages.get("Adasum", {}).get("on") == "weights"


def _sent(options, grads, residual, frozen):
    """What one rank sends of its dense gradients; changes what it keeps."""
    wanted = {name: grads.of[name] + residual.get(name, 0.0) for name in DENSE if name not in frozen}
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
    """Which values have the largest magnitudes; of equal ones the first."""
    chosen = np.zeros(vector.size, bool)
    chosen[np.argsort(-np.abs(vector), kind="stable")[: math.ceil(density * vector.size)]] = True
    return chosen


def adasum_tree(grads):
    """Adasum of one variable's gradients, in pairs of neighbours, pairs of pairs and so on."""
    while len(grads) > 1:
        grads = [
            sum((1 - np.sum(a * b) / (2 * np.sum(x * x))) * x for x in (a, b) if x.any())
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
    # Gradients of vectors, and sparse ones, stay what they are.
    if "CentralizeGradients" in stages and "kernel" not in stages["CentralizeGradients"].get("skip", ()):
        kernel = grads.of["kernel"]
        grads = _Grads({**grads.of, "kernel": kernel - kernel.mean(axis=0, keepdims=True)}, grads.rows)
    return grads


def _update(values, slots, grads, momentum, frozen):
    """The momentum optimizer of TensorFlow: of a sparse gradient it updates the rows that are there."""
    for name in grads.of.keys() - set(frozen):
        grad = grads.of[name]
        there = np.broadcast_to(grads.rows[:, np.newaxis] if name == "table" else True, grad.shape)
        slots[name] = np.where(there, momentum * slots[name] + grad, slots[name])
        values[name] = values[name] - np.where(there, LEARNING_RATE * slots[name], 0.0)


def _partitions(threshold):
    """From the last variable on: a large one by itself, small ones together until they are more than the threshold."""
    cut, together = [], []
    for name in reversed(SHAPES):
        if math.prod(SHAPES[name]) > threshold:
            cut.append((name,))
            continue
        together.append(name)
        if sum(math.prod(SHAPES[other]) for other in together) > threshold:
            cut, together = [*cut, tuple(together)], []
    return [*cut, tuple(together)] if together else cut
