"""Four layers of which some are frozen, trained in numpy."""

from __future__ import annotations

import numpy as np

from npu_bridge.gradients.freeze_schedule import FreezeSchedule

LAYERS, WIDTH, ROWS, STEPS = 4, 3, 4, 51
RATE, MOMENTUM, FIRST_SCALE, GROWS_EVERY, NORM = 0.2, 0.9, 2.0**8, 5, 0.3
SEED = 1
# Group 1 freezes the first layer, group 2 the first two.
GROUPS = [["layer_0"], ["layer_1"], ["layer_2", "layer_3/kernel"]]
FROZEN = ((), ("layer_0",), ("layer_0", "layer_1"))
SCHEDULE = {"groups": GROUPS, "full_share": 0.5, "total_steps": 15, "seed": SEED}  # shorter than the training
SEQUENCE = FreezeSchedule(**SCHEDULE).sequence
CHAINS = {
    "alone": {},
    "clipped": {"norm": NORM},
    "all": {"norm": NORM, "window": 2, "local": 0.05},
}


def start_values():
    """What the variables are before the first step, by name."""
    random = np.random.RandomState(1)
    return {
        f"layer_{number}/{kind}": random.randn(*([WIDTH] * rank)).astype(np.float32)
        for number in range(LAYERS)
        for kind, rank in (("kernel", 2), ("bias", 1))
    }


def batches_of(rank, steps=STEPS):
    """Inputs and labels of a rank, of which some are not finite."""
    random = np.random.RandomState(10 + rank)
    inputs, labels = (random.randn(steps, ROWS, WIDTH).astype(np.float32) for _ in range(2))
    for step, of_rank in ((6, 0), (20, 1), (33, 0)):
        if of_rank == rank and step < steps:
            labels[step, 0, 0] = np.inf if step == 6 else np.nan
    return inputs, labels


def in_numpy(chain, rank_count, steps=STEPS):
    """Variables after training, the loss scale before each step, the group of each update."""
    settings = CHAINS[chain]
    values = {name: value.astype(np.float64) for name, value in start_values().items()}
    moments = {name: np.zeros_like(value) for name, value in values.items()}
    window, scale, good = settings.get("window", 1), FIRST_SCALE, 0
    batches = [batches_of(rank, steps) for rank in range(rank_count)]
    scales, groups, local = [], [], []
    for step in range(steps):
        scales.append(scale)
        if step % window == 0:
            local = [dict.fromkeys(values, 0.0) for _ in batches]
        for sums, (inputs, labels) in zip(local, batches):
            for name, grad in gradients_in_numpy(values, inputs[step], labels[step]).items():
                sums[name] = sums[name] + grad / window
        if (step + 1) % window:
            continue
        group = int(SEQUENCE[len(groups) % len(SEQUENCE)])
        trained = [name for name in values if not name.startswith(FROZEN[group] or ("none",))]
        if not all(np.all(np.isfinite(sums[name])) for sums in local for name in trained):
            scale, good = scale / 2, 0
            continue
        good += 1
        scale, good = (scale * 2, 0) if good == GROWS_EVERY else (scale, good)
        bound = settings.get("local", np.inf)
        grads = {name: np.mean([np.clip(sums[name], -bound, bound) for sums in local], axis=0) for name in trained}
        norm = np.sqrt(sum(np.sum(np.square(grad)) for grad in grads.values()))
        for name, grad in grads.items():
            moments[name] = MOMENTUM * moments[name] + grad * min(1.0, settings.get("norm", np.inf) / norm)
            values[name] = values[name] - RATE * moments[name]
        groups.append(group)
    return values, scales, groups


def gradients_in_numpy(values, inputs, labels):
    """Of the mean squared error of tanh layers."""
    outputs = [inputs.astype(np.float64)]
    for number in range(LAYERS):
        kernel, bias = (values[f"layer_{number}/{kind}"] for kind in ("kernel", "bias"))
        outputs.append(np.tanh(outputs[-1] @ kernel + bias))
    grads = {}
    with np.errstate(invalid="ignore"):
        signal = 2 * (outputs[-1] - labels) / labels.size
        for number in reversed(range(LAYERS)):
            signal = signal * (1 - outputs[number + 1] ** 2)
            grads[f"layer_{number}/kernel"] = outputs[number].T @ signal
            grads[f"layer_{number}/bias"] = signal.sum(axis=0)
            signal = signal @ values[f"layer_{number}/kernel"].T
    return grads


def expected_runs(groups, scales, window, is_stopped):
    """How often the backward pass of each layer is to be computed."""
    steps, updates = len(scales), iter([*groups, None])
    if not is_stopped:
        return [steps] * LAYERS
    runs, group = [0] * LAYERS, next(updates)
    for step in range(steps):
        current = int(SEQUENCE[(len(groups) if group is None else 0) % len(SEQUENCE)]) if group is None else group
        frozen = len(FROZEN[current])
        for layer in range(frozen, LAYERS):
            runs[layer] += 1
        is_skipped = step + 1 < steps and scales[step + 1] < scales[step]
        if (step + 1) % window == 0 and not is_skipped:
            group = next(updates, None)
    return runs
