"""A script as the documentation of accelerate_train_mode has it, by step and by loss, run as people run it."""

from __future__ import annotations

import json
import pathlib

SCRIPT = pathlib.Path(__file__).parent / "scripts" / "accelerate_train.py"
REPOSITORY = SCRIPT.parents[3]
LOW, ORIGINAL = ["float16"], ["float32"]


def run(python, folder, *flags):
    done = python.run([SCRIPT, f"--model_dir={folder}", *flags], REPOSITORY)
    assert done.returncode == 0, done.stdout + done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def test_by_step(warm_python, tmp_path):
    said = run(warm_python, tmp_path, "--accelerate_train_mode=fast|step|0.5", "--train_steps=12")
    *steps, evaluation = said["kernels"]
    assert steps == [LOW] * 6 + [ORIGINAL] * 6
    assert evaluation == ORIGINAL
    assert (said["STEP_NOW"], said["TOTAL_STEP"], said["LOSS_NOW"]) == ("12", "12", None)
    assert said["loss"] < said["losses"][0]


def test_by_loss(warm_python, tmp_path):
    said = run(warm_python, tmp_path, "--accelerate_train_mode=fast|loss|1.25", "--train_steps=40", "--final_loss=0.6")
    *steps, evaluation = said["kernels"]
    reached = next(step for step, loss in enumerate(said["losses"]) if loss <= 0.75)
    assert 0 < reached < 38
    assert steps == [LOW] * (reached + 1) + [ORIGINAL] * (39 - reached)
    assert evaluation == ORIGINAL
    assert (said["TARGET_LOSS"], said["STEP_NOW"]) == ("0.6", None)
