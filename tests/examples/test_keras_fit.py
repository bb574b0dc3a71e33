"""The Keras example, run as people run it: on one process, gone on with, and on two ranks."""

from __future__ import annotations

import os
import pathlib
import re
import subprocess
import sys

import pytest

REPOSITORY = pathlib.Path(__file__).parents[2]
SCRIPT = str(REPOSITORY / "examples" / "keras_fit" / "train.py")


def run(folder, *flags, ranks=1):
    environment = {**os.environ, "PYTHONPATH": str(REPOSITORY)}
    launcher = [sys.executable] if ranks == 1 else [sys.executable, "-m", "npu_bridge.run", "-np", str(ranks)]
    command = [*launcher, SCRIPT, "--output_dir", str(folder), *flags]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def result_of(printed):
    return float(re.search(r"new pictures: loss (\d+\.\d+)", printed).group(1))


@pytest.mark.ranks(2)
def test_one_process_and_two_ranks_train_alike_and_go_on(tmp_path):
    alone = run(tmp_path / "alone", "--steps", "12")
    assert re.search(r"step 12/12  mean loss [0-9.]+  accuracy [0-9.]+%  loss scale 32768  skipped 0", alone)
    together = run(tmp_path / "together", "--steps", "12", ranks=2)
    assert abs(result_of(together) - result_of(alone)) < 1e-3
    assert not re.search(r"\[rank 1\] step", together), "rank 0 speaks alone"

    again = run(tmp_path / "together", "--steps", "16", ranks=2)
    assert "going on from" in again
    assert "step 13/16" in again
    assert "step 16/16" in again
    assert "step 12/16" not in again
