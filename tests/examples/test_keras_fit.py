"""The Keras example, as people run it: on one process, on two ranks, killed and resumed."""

from __future__ import annotations

import io
import re
import zipfile

import h5py
import numpy as np
import pytest

from tests.examples.commands import run, run_until_killed, run_warm

ALONE = "python examples/keras_fit/train.py"
TOGETHER = "npu-run -np 2 examples/keras_fit/train.py"


def result_of(printed):
    return float(re.search(r"new pictures: loss (\d+\.\d+)", printed).group(1))


def state_of(model):
    """Weights, slots, counters and loss scale of a saved model; not the running means of its metrics."""
    state = {}

    def keep(name, item):
        if isinstance(item, h5py.Dataset) and not name.startswith("metrics/"):
            state[name] = item[()]

    with h5py.File(io.BytesIO(zipfile.ZipFile(model).read("model.weights.h5"))) as weights:
        weights.visititems(keep)
    return state


@pytest.mark.slow("three trainings")
@pytest.mark.ranks(2)
def test_two_ranks_go_on_after_a_kill_as_if_nothing_had_happened_and_train_as_one_process(warm_python, tmp_path):
    cut, whole, alone = (tmp_path / name for name in ("cut", "whole", "alone"))
    saved = cut / "model.keras"
    # Killed in the middle of anything, even of saving: what is in the folder is whole.
    run_until_killed(TOGETHER, "--steps", 100_000, "--save_steps", 5, "--output_dir", cut, is_time=saved.exists)
    reached = int(state_of(saved)["optimizer/vars/0"])
    flags = ("--steps", reached + 15, "--output_dir")
    printed = run(TOGETHER, *flags, cut)
    assert f"resuming from {saved}" in printed
    assert re.findall(r"^step (\d+)/", printed, re.MULTILINE)[0] == str(reached + 1)
    assert not re.search(r"\[rank 1\] step", printed), "rank 0 speaks alone"

    uninterrupted = run(TOGETHER, *flags, whole)
    expected, got = state_of(whole / "model.keras"), state_of(saved)
    assert expected.keys() == got.keys()
    assert [name for name in expected if not np.array_equal(expected[name], got[name])] == []
    assert result_of(uninterrupted) == result_of(printed)

    of_one = run_warm(warm_python, ALONE, *flags, alone)
    assert re.search(r"mean loss [0-9.]+  accuracy [0-9.]+%  loss scale 32768  skipped 0", of_one)
    assert abs(result_of(of_one) - result_of(printed)) < 1e-2


RECIPE = "npu-run -np 2 examples/keras_fit/recipe.py"


@pytest.mark.slow("two trainings")
@pytest.mark.ranks(2)
def test_the_recipe_trains_and_resumes_on_two_ranks(tmp_path):
    """In Keras 2 or 3, whichever `keras` is here; tests/ranks/test_resume_callback.py holds the patience."""
    first = run(RECIPE, "--epochs", 1, "--output_dir", tmp_path)
    assert "resuming" not in first and re.search(r"updates 28  skipped 0  loss scale 32768", first), first
    second = run(RECIPE, "--epochs", 2, "--output_dir", tmp_path)
    assert "resuming at epoch 2, after 56 batches" in second and "updates 56 " in second, second
    assert "Epoch 2/2" in second and "Epoch 1/2" not in second and "[rank 1] Epoch" not in second
    assert re.search(r"best model: [0-9.]+% right; .*best.keras", second)
    assert {"best.keras", "model.keras", "report.html"} <= {path.name for path in tmp_path.iterdir()}
