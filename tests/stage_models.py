"""Gradients that are fed to trainings with stages, and what numpy makes of them."""

from __future__ import annotations

import numpy as np

STEPS, LEARNING_RATE, FIRST_SCALE, GROWS_EVERY = 51, 0.1, 2.0**10, 4
WINDOW = 3
TOP_SHARE, LEAST = 0.3, 0.8
PARTITION_VALUES, PARTITIONS = 12, (("table", "vector"), ("kernel",))
_UPDATES_ON_WEIGHTS = {"adasum of weights", "adasum of weights, of means"}
_UPDATES_ALONE = {"partial sync", *_UPDATES_ON_WEIGHTS}
SHAPES = {"kernel": (4, 3), "vector": (3,), "table": (6, 2)}


def gradients_of(rank, steps=STEPS):
    """One dict of gradients per step; those of the table are rows with repeated indices. Some are not finite."""
    random = np.random.RandomState(rank)
    fed = []
    for step in range(steps):
        grads = {name: random.randn(*shape).astype(np.float32) for name, shape in SHAPES.items()}
        grads["rows"] = random.randint(0, 6, 5)
        grads["table"] = random.randn(5, 2).astype(np.float32)
        fed.append(grads)
        if (step, rank) in ((7, 0), (20, 1), (38, 0)):
            grads["kernel"][1, 1] = np.inf if step == 7 else np.nan
    return fed


def start_values():
    """What the variables are before the first step."""
    random = np.random.RandomState(100)
    return {name: random.randn(*shape).astype(np.float32) for name, shape in SHAPES.items()}


def in_numpy(chain, rank_count, steps=STEPS):
    """The variables of each rank after training, the loss scale before each step, updates, and what is not sent."""
    values = [{name: value.astype(np.float64) for name, value in start_values().items()} for _ in range(rank_count)]
    window = WINDOW if any(name.startswith("accumulate") for name in chain) else 1
    divisor = WINDOW if "accumulate" in chain else 1
    fed = [gradients_of(rank, steps) for rank in range(rank_count)]
    scale, good, updates, scales = FIRST_SCALE, 0, 0, []
    residuals = [{name: np.zeros(SHAPES[name]) for name in ("kernel", "vector")} for _ in range(rank_count)]
    for step in range(steps):
        scales.append(scale)
        if (step + 1) % window:
            continue
        local = []
        for rank in range(rank_count):
            batches = [_dense(fed[rank][number]) for number in range(step - window + 1, step + 1)]
            local.append({name: sum(batch[name] for batch in batches) / divisor for name in SHAPES})
        if not all(np.all(np.isfinite(grad)) for sent in local for grad in sent.values()):
            scale, good = scale / 2, 0
            continue
        good += 1
        before = [{name: value.copy() for name, value in of_rank.items()} for of_rank in values]
        scale, good = (scale * 2, 0) if good == GROWS_EVERY else (scale, good)
        for rank, grads in enumerate(_transformed(chain, local, residuals)):
            for name, grad in grads.items():
                values[rank][name] -= LEARNING_RATE * grad
        if _UPDATES_ON_WEIGHTS & set(chain):
            for name in SHAPES:
                deltas = [old[name] - new[name] for old, new in zip(before, values)]
                combined = adasum_tree(deltas[:: 2 if "adasum of weights, of means" in chain else 1])
                for old, new in zip(before, values):
                    new[name] = old[name] - combined
        if "partial sync" in chain:
            for name in PARTITIONS[updates % len(PARTITIONS)]:
                mean = np.mean([of_rank[name] for of_rank in values], axis=0)
                for of_rank in values:
                    of_rank[name] = mean.copy()
        updates += 1
    return values, scales, updates, residuals


def _dense(grads):
    dense = np.zeros(SHAPES["table"], np.float64)
    np.add.at(dense, grads["rows"], grads["table"])
    return {"kernel": grads["kernel"].astype(np.float64), "vector": grads["vector"].astype(np.float64), "table": dense}


def _sent(chain, grads, residual):
    """What one rank sends of its dense gradients; changes what it keeps."""
    sent = dict(grads)
    together = np.abs(np.concatenate([(grads[name] + kept).ravel() for name, kept in residual.items()]))
    for name, kept in residual.items():
        wanted = np.abs(grads[name] + kept)
        if "threshold" in chain:
            chosen = wanted >= LEAST
        else:
            among = together if "top k of a fragment" in chain else wanted.ravel()
            chosen = wanted >= np.sort(among)[-int(np.ceil(TOP_SHARE * among.size))]
        sent[name] = np.where(chosen, grads[name] + kept, 0)
        if "top k, forgetful" not in chain:
            residual[name] = grads[name] + kept - sent[name]
    return sent


def adasum_tree(grads):
    """Adasum of one variable's gradients, in pairs of neighbours, pairs of pairs and so on."""
    while len(grads) > 1:
        pairs = zip(grads[::2], grads[1::2])
        grads = [sum((1 - np.sum(a * b) / (2 * np.sum(x * x))) * x for x in (a, b)) for a, b in pairs]
    return grads[0]


def _combined(chain, local):
    """What the ranks make of all their gradients."""
    gradients_of_name = {name: [sent[name] for sent in local] for name in SHAPES}
    if "adasum" in chain:
        return {name: adasum_tree(grads) for name, grads in gradients_of_name.items()}
    if "adasum of means" in chain:
        return {
            name: adasum_tree([np.mean(grads[first : first + 2], axis=0) for first in range(0, len(grads), 2)])
            for name, grads in gradients_of_name.items()
        }
    return {name: np.mean(grads, axis=0) for name, grads in gradients_of_name.items()}


def _transformed(chain, local, residuals):
    """What each rank updates with."""
    if "clip locally" in chain:
        local = [{name: np.clip(grad, -0.5, 0.75) for name, grad in sent.items()} for sent in local]
    if {"top k", "top k, forgetful", "top k of a fragment", "threshold"} & set(chain):
        local = [_sent(chain, grads, residual) for grads, residual in zip(local, residuals)]
    of_ranks = local if _UPDATES_ALONE & set(chain) else [_combined(chain, local)] * len(local)
    if "adasum of weights, of means" in chain:
        means = [_combined(chain, local[first : first + 2]) for first in range(0, len(local), 2)]
        of_ranks = [mean for mean in means for _ in range(2)]
    return [_of_reduced(chain, grads) for grads in of_ranks]


def _of_reduced(chain, grads):
    if "clip by value" in chain:
        grads = {name: np.clip(grad, -0.4, 0.4) for name, grad in grads.items()}
    if "clip by norm" in chain:
        norm = np.sqrt(sum(np.sum(np.square(grad)) for grad in grads.values()))
        grads = {name: grad * min(1.0, 1.5 / norm) for name, grad in grads.items()}
    if "centralise" in chain:  # of the table the gradient is sparse
        grads["kernel"] = grads["kernel"] - grads["kernel"].mean(axis=0, keepdims=True)
    return grads
