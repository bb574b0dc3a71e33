"""The digits, as people run them: trained, killed, resumed, evaluated, exported; alone and on two ranks."""

from __future__ import annotations

import json
import pathlib
import re

import numpy as np
import pytest
import tensorflow as tf

from npu_bridge.reporting import History
from tests.examples.commands import run, run_until_killed, run_warm
from tests.reporting.chromium import assert_page

ESTIMATOR = "npu-run -np 2 examples/digits/train_estimator.py"
SESSION = "python examples/digits/train_session.py"


def step_of(folder):
    """The step of the newest checkpoint, 0 when there is none."""
    checkpoint = tf.train.latest_checkpoint(str(folder))
    return int(checkpoint.rpartition("-")[2]) if checkpoint else 0


def assert_same_checkpoints(one, other):
    """Every variable of both newest checkpoints, bit for bit."""
    readers = [tf.train.load_checkpoint(str(folder)) for folder in (one, other)]
    names = readers[0].get_variable_to_shape_map()
    assert names == readers[1].get_variable_to_shape_map()
    different = [name for name in names if not np.array_equal(*(reader.get_tensor(name) for reader in readers))]
    assert different == []


@pytest.mark.slow("three trainings")
@pytest.mark.ranks(2)
def test_estimator_killed_on_two_ranks_goes_on_as_if_nothing_had_happened(warm_python, tmp_path):
    cut, whole = tmp_path / "cut", tmp_path / "whole"
    flags = ("--save_steps", 10, "--output_dir")
    run_until_killed(ESTIMATOR, *flags, cut, "--steps", 100_000, is_time=lambda: step_of(cut) >= 20)
    reached = step_of(cut)
    steps = ("--steps", reached + 15)
    printed = run(ESTIMATOR, *flags, cut, *steps)
    run(ESTIMATOR, *flags, whole, *steps)
    assert_same_checkpoints(cut, whole)

    rows = [json.loads(line) for line in (cut / "history.jsonl").read_text().splitlines()]
    assert [row["start"] for row in rows if "start" in row] == [0, reached]
    losses = {row["step"]: row["loss"] for row in rows if "step" in row}
    # The row of the checkpoint's own step comes after the evaluation in which the training was killed, if it was.
    assert [step for step in range(1, reached + 16) if step not in losses] in ([], [reached])
    assert losses[reached + 15] < losses[1] - 0.5
    evaluated = [each.step for each in History(str(cut / "history.jsonl")).evaluations]
    assert evaluated[-1] == reached + 15 and len(evaluated) == len(set(evaluated)), "rank 0 speaks alone, once"
    assert_picture(pathlib.Path(re.search(r"picture: (\S+)", printed).group(1)))
    page = assert_page(cut / "report.html", reached + 15, tmp_path / "profile")
    assert "npu-run -np 2 examples/digits/train_estimator.py" in page and "training resumed here" in page
    assert_reads_pictures(warm_python, cut, reached + 15)


def assert_picture(path):
    text = path.read_text()
    assert "<svg" in text and text.count("<path") > 50


def assert_reads_pictures(python, folder, step):
    printed = run_warm(python, "python examples/digits/predict.py", "--model_dir", folder, "--pictures", 2)
    assert float(re.search(rf"step {step}: ([0-9.]+)% of the held-out", printed).group(1)) > 60
    assert len(re.findall(r"read as \d, [0-9.]+% sure; it is \d", printed)) == 2
    exported, alike = re.search(r"exported to (\S+): reads (\d+)% of the pictures alike", printed).groups()
    assert tf.saved_model.contains_saved_model(exported) and alike == "100"


@pytest.mark.slow("three trainings")
@pytest.mark.ranks(2)
def test_session_killed_goes_on_as_if_nothing_had_happened_and_two_ranks_do_the_same(warm_python, tmp_path):
    cut, whole, shared = (tmp_path / name for name in ("cut", "whole", "shared"))
    flags = ("--save_steps", 20, "--output_dir")
    run_until_killed(SESSION, *flags, cut, "--steps", 100_000, is_time=lambda: step_of(cut) >= 40)
    steps = ("--steps", step_of(cut) + 40)
    printed = run_warm(warm_python, SESSION, *flags, cut, *steps)
    assert f"step 20/{steps[1]}" not in printed, "it started over"
    assert result_of(run_warm(warm_python, SESSION, *flags, whole, *steps)) == result_of(printed)
    assert_same_checkpoints(cut, whole)

    together = run("npu-run -np 2 examples/digits/train_session.py", *flags, shared, *steps)
    assert abs(result_of(together) - result_of(printed)) < 1.0, "the same batches, on any number of ranks"
    assert together.count("held out") == 1, "rank 0 speaks alone"


def result_of(printed):
    """The share of held-out pictures that is read right, in per cent."""
    return float(re.search(r"held out: ([0-9.]+)% right", printed).group(1))


@pytest.mark.slow("trains at every level")
def test_levels_are_drawn_side_by_side(warm_python, tmp_path):
    flags = ("--steps", 12, "--levels", "O0", "O3", "--output_dir", tmp_path)
    printed = run_warm(warm_python, "python examples/digits/levels.py", *flags)
    kilobytes = dict(re.findall(r"^(O\d): [0-9.]+% right, (\d+) kB", printed, re.MULTILINE))
    # A variable and its momentum take 8 bytes at O0; at O3 2, 4 of the value that is updated, and 4 of its momentum.
    assert 1.2 < int(kilobytes["O3"]) / int(kilobytes["O0"]) < 1.3
    assert_picture(tmp_path / "levels.svg")
