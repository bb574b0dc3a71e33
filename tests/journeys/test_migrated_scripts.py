"""The claims of docs/ported.md: scripts of the migration guides and the porting tool train, alone and on two ranks."""

from __future__ import annotations

import json
import os
import pathlib

import numpy as np
import pytest
import tensorflow as tf

from tests.journeys.test_readme import environment_of_a_user
from tests.journeys.test_readme import run as run_command

SCRIPTS = pathlib.Path(__file__).parent / "scripts"

both = pytest.mark.parametrize("ranks", [1, pytest.param(2, marks=pytest.mark.ranks(2))], ids=["alone", "on two ranks"])


def run(python, script, ranks, folder):
    """Runs a script; gives what every rank has written down, as lists of a fact by pattern."""
    command = [str(SCRIPTS / script), str(folder)]
    if ranks == 1:
        done = python.run(command, folder, environment_of_a_user())
        assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-6000:]
    else:
        run_command(["npu-run", "-np", str(ranks), *command], folder)
    return [json.loads((folder / f"rank_{rank}.json").read_text()) for rank in range(ranks)]


def assert_trained(facts, patterns):
    """Each pattern made the loss fall to a third, and left the same weights on every rank."""
    assert [list(of_rank) for of_rank in facts] == [patterns] * len(facts)
    for pattern in patterns:
        losses = facts[0][pattern]["losses"]
        assert losses[-1] < losses[0] / 3, (pattern, losses)
        weights = [of_rank[pattern]["weights"] for of_rank in facts]
        assert all(of_rank == weights[0] for of_rank in weights), (pattern, weights)


def checkpoint_of(folder):
    return os.path.basename(tf.train.latest_checkpoint(str(folder)) or "none")


@pytest.mark.few_fast(1, "on two ranks three trainings")
@both
def test_estimator(warm_python, ranks, tmp_path):
    facts = run(warm_python, "migrated_estimator.py", ranks, tmp_path)
    assert_trained(facts, ["npu_estimator", "loss_scale", "stock_estimator"])
    for of_rank in facts:
        assert len(of_rank["npu_estimator"]["losses"]) == 12, "five steps in each run"
        assert [of_rank[pattern]["step"] for pattern in of_rank] == [60, 40, 40]
        runs, scales = len(of_rank["loss_scale"]["losses"]), of_rank["loss_scale"]["scales"]
        assert runs > 40 and scales[-1] == max(2.0 ** (10 - (runs - 40)), 1.0), "each overflow cost a step and halved"
        assert scales == facts[0]["loss_scale"]["scales"]
    assert np.isfinite(facts[0]["loss_scale"]["losses"]).all() == (ranks == 2), "the last rank alone saw the overflow"
    assert not np.isfinite(facts[-1]["loss_scale"]["losses"]).all()
    assert facts[0]["npu_estimator"]["error"] < 0.5 and facts[0]["npu_estimator"]["answers"] == 3
    for pattern, step in (("npu_estimator", 60), ("loss_scale", 40), ("stock_estimator", 40)):
        assert checkpoint_of(tmp_path / pattern) == f"model.ckpt-{step}"


@pytest.mark.few_fast(1, "on two ranks the Estimator alone")
@both
def test_session(warm_python, ranks, tmp_path):
    facts = run(warm_python, "migrated_session.py", ranks, tmp_path)
    assert_trained(facts, ["options_in_the_map", "own_gradients", "monitored", "supervisor", "from_horovod"])
    for of_rank in facts:
        assert [of_rank[pattern]["step"] for pattern in of_rank] == [40, 40, 60, 40, 20]
        assert [len(of_rank[pattern]["losses"]) for pattern in of_rank] == [2, 40, 12, 8, 20]
        assert of_rank["options_in_the_map"]["scale"] == 1024.0
        assert of_rank["monitored"]["hooks"] == 4
        assert of_rank["from_horovod"]["printer"] == "OutOfRangeError"
        every = of_rank["from_horovod"]["every"]
        assert len(every) == ranks and np.isclose(of_rank["from_horovod"]["losses"][-1], np.mean(every))
    assert checkpoint_of(tmp_path / "monitored") == "model.ckpt-60"
    assert checkpoint_of(tmp_path / "supervisor") == "model.ckpt-40"


@pytest.mark.few_fast(1, "on two ranks the Estimator alone")
@both
def test_keras(warm_python, ranks, tmp_path):
    facts = run(warm_python, "migrated_keras.py", ranks, tmp_path)
    # An estimator's weights are in its checkpoint, from rank 0.
    of_estimator = [of_rank.pop("as_estimator")["losses"] for of_rank in facts]
    assert of_estimator[0][1] < of_estimator[0][0] / 3 and of_estimator[1:] == [[]] * (ranks - 1)
    assert checkpoint_of(tmp_path / "as_estimator") == "model.ckpt-60"
    assert_trained(facts, ["keras_optimizer", "wrapped_by_name", "loss_scale"])
    for of_rank in facts:
        scaled = of_rank["loss_scale"]
        assert (scaled["is_skipped"], scaled["scale"], scaled["step"]) == (True, 512.0, 24)
    assert (tmp_path / "keras_optimizer.h5").stat().st_size > 1000
