"""Trains goldens on a rank, and compares the results with the model in numpy."""

from __future__ import annotations

import numpy as np

from npu_bridge import collective
from tests.goldens.cases import GOLDENS
from tests.goldens.models import in_numpy
from tests.goldens.problems import LAYERS
from tests.goldens.two_layers import assert_same_bits
from tests.goldens.ways import WAYS, is_apart

# Ways that end the backward pass before the frozen layers.
_STOPPING = ("function", "fit, legacy", "fit, current")
_NAMED = ("graph", "graph, tailed", "function", "function, own tape", "eager")  # variables of others have numbers


def trained(pairs):
    """Trains on a rank; returns steps, updates, kept values and backward passes by way and name of a golden."""
    found = {}
    for way, name in pairs:
        training = WAYS[way](GOLDENS[name])
        trace = training.train(GOLDENS[name].problem.fed_to(collective.current().rank))
        kept = [kept_in(training.everything(), folder) for folder in ("not_sent", "accumulated")]
        counted = getattr(training, "counted", None)
        found[way, name] = trace, training.updates(), kept, counted and counted.runs
    return found


def assert_equals_numpy(results):
    """Checks the results of `trained`, by rank, against the model."""
    for way, name in results[0]:
        golden, model = GOLDENS[name], in_numpy(GOLDENS[name], len(results))
        assert 0 < model.trace[-1].updates < golden.problem.steps
        assert {after.is_bad for after in model.trace} == {True, False}
        for rank, (trace, updates, (not_sent, accumulated), runs) in enumerate(found[way, name] for found in results):
            where = f"{way}, {name}, rank {rank}"
            assert updates == model.trace[-1].updates, where
            _assert_trace_equals(golden, trace, model.trace, rank, results[0][way, name][0], where)
            if way in _NAMED:
                assert_close(not_sent, model.residuals[rank], where)
                assert_close(accumulated, model.sums[rank], where)
            if runs is not None and any(runs):
                assert runs == backward_passes(model.trace, way in _STOPPING), where


def _assert_trace_equals(golden, trace, expected, rank, of_rank_0, where):
    before, updates = golden.problem.start_values(), 0
    assert len(trace) == len(expected), where
    for step, (seen, model, first) in enumerate(zip(trace, expected, of_rank_0)):
        at = f"{where}, step {step}"
        np.testing.assert_array_equal(np.float32(np.ravel(seen.scales)), np.float32(model.scales), err_msg=at)
        if seen.report is not None and not any(table["stage"] == "Accumulate" for table in golden.stages):
            assert bool(seen.report.overflow) == model.is_bad, at
        if seen.report is not None and seen.losses is not None:
            np.testing.assert_allclose(np.ravel(seen.report.loss), seen.losses, rtol=1e-6, err_msg=at)
        assert_close(seen.values, model.values[rank], at, golden.problem)
        for name, value in seen.values.items():
            is_kept = model.updates == updates or name in model.frozen
            assert not is_kept or value.tobytes() == before[name].tobytes(), f"{at}: {name} has changed"
            if name in model.alike:
                assert value.tobytes() == first.values[name].tobytes(), f"{at}: {name} differs between ranks"
        before, updates = seen.values, model.updates


def assert_close(actual, expected, where, problem=GOLDENS["accumulate"].problem):
    """Compares arrays by name, float32 with float64 after all steps."""
    assert set(actual) == set(expected), where
    for name, value in expected.items():
        np.testing.assert_allclose(actual[name], value, problem.rtol, problem.atol, err_msg=f"{where}: {name}")


def backward_passes(trace, is_stopped):
    """Returns how often the backward pass of each layer has to be computed."""
    kernels = [f"layer_{number}/kernel" for number in range(LAYERS)]
    return [sum(not (is_stopped and kernel in after.frozen) for after in trace) for kernel in kernels]


def kept_in(everything, folder):
    """Returns the values that stages keep, by the variable's name without scopes."""
    found = {name.partition(":")[0]: value for name, value in everything.items() if folder + "/" in name}
    own = {name: value for name, value in found.items() if "of_ranks" not in name and not name.endswith("_rows")}
    return {name.rpartition(folder + "/")[2]: value for name, value in own.items()}


def resumed(way, name, folder, stop=11, steps=16):
    """Returns every variable after an unbroken training, and after and before a restart from rank 0's checkpoint."""
    ranks = collective.current()
    fed = GOLDENS[name].problem.fed_to(ranks.rank, steps)
    whole, before, after = (WAYS[way](GOLDENS[name]) for _ in range(3))
    whole.train(fed)
    before.train(fed[:stop])
    left = before.everything()
    if is_apart(GOLDENS[name]):
        before.sync()
    path = before.save(f"{folder}/{way}_{ranks.rank}")
    ranks.exchange_integers([0], f"saved_{list(WAYS).index(way)}_{list(GOLDENS).index(name)}")
    after.restore(path.replace(f"{way}_{ranks.rank}", f"{way}_0"))
    after.train(fed[stop:])
    before.train(fed[stop:])
    assert_same_bits(before.everything(), whole.everything())
    return whole.everything(), after.everything(), left
