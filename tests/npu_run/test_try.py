"""`npu-run try` trains the first steps of a script and says whether it trains; it leaves nothing behind."""

from __future__ import annotations

import json
import os
import signal

import pytest

from npu_bridge.reporting.history import StepRow
from npu_run.try_ import _describe_problem, _describe_training
from tests.npu_run.launching import finish, is_alive, needs_horovod, npu_run, start, wait_for, write_script

FIT = """
import sys
import numpy as np
import tensorflow as tf
import npu_bridge
model = tf.keras.Sequential([tf.keras.layers.Dense(2, kernel_initializer="zeros", input_shape=(3,))])
model.compile(tf.keras.optimizers.SGD(0.0), "mse")
model.fit(np.ones([8, 3]), np.ones([8, 2]), batch_size=1)
open("written.txt", "w")
"""


def test_a_script_that_trains_and_one_that_does_not(tmp_path):
    write_script(tmp_path, FIT)
    code, output = npu_run("try", "--steps", 2, "train.py", "--", "--rate", "1", cwd=tmp_path)
    assert code == 0, output
    first, second, third = output.splitlines()
    assert first == "try: train.py, 2 steps on 1 rank, in a temporary folder"
    assert second.startswith("try: it trains: loss 1 -> 1, 8 parameters")
    assert third == "try: next, the whole training: npu-run train.py --rate 1"
    write_script(tmp_path, "print('begins')\nraise RuntimeError('no data')", "bad.py")
    code, output = npu_run("try", "bad.py", cwd=tmp_path)
    assert code == 1 and "  RuntimeError: no data\n" in output, output
    assert output.splitlines()[-1].endswith("exit code 1; its last lines are above")
    code, output = npu_run("try", "--json", "bad.py", cwd=tmp_path)
    facts = json.loads(output[output.index("{") :])
    assert code == 1 and facts["verdict"] == "no" and "exit code 1" in facts["why"] and facts["losses"] == []
    assert sorted(os.listdir(tmp_path)) == ["bad.py", "train.py"]


def test_a_signal_ends_the_script_of_a_trial_too(tmp_path):
    write_script(tmp_path, "import os, time\nopen('pid', 'w').write(str(os.getpid()))\ntime.sleep(600)")
    process = start("try", "train.py", cwd=tmp_path, TMPDIR=str(tmp_path))
    wait_for(lambda: (tmp_path / "pid").exists() and (tmp_path / "pid").read_text(), "the script")
    process.send_signal(signal.SIGTERM)
    code, _ = finish(process)
    assert code == 143 and not is_alive(int((tmp_path / "pid").read_text()))
    assert sorted(os.listdir(tmp_path)) == ["pid", "train.py"]


CONFIG = """
import os
from npu_bridge.npu_init import NPURunConfig
config = NPURunConfig(save_checkpoints_steps=5)
print(f"rank {os.environ['RANK_ID']}: {config!r}")
"""


@pytest.mark.slow("two jobs; tests/options has options from the shell")
@needs_horovod
@pytest.mark.ranks(2)
def test_an_option_is_changed_on_every_rank(tmp_path):
    write_script(tmp_path, CONFIG, "config.py")
    words = ("--set", "save_checkpoints_steps=7", "--set", "precision_mode_v2=origin")
    code, output = npu_run("-np", 2, *words, "config.py", cwd=tmp_path)
    assert code == 0, output
    for rank in (0, 1):
        made = "NPURunConfig(save_checkpoints_steps=7, precision_mode_v2='origin')"
        assert f"rank {rank}: {made}\n" in output, output
    told = f"npu-run: the NPURunConfig of config.py:4 takes {' '.join(words)}\n"
    assert output.count("takes --set") == 1 and told in output, output
    code, output = npu_run("--set", "save_checkpoint_steps=7", "config.py", cwd=tmp_path)
    assert code == 2 and "starting" not in output and "Did you mean 'save_checkpoints_steps'?" in output, output
    code, output = npu_run("try", "--set", "save_checkpoints_steps='7'", "config.py", cwd=tmp_path)
    assert code == 2 and output.startswith("npu-run try: --set save_checkpoints_steps='7': NPURunConfig: "), output
    code, output = npu_run("try", *words, "config.py", cwd=tmp_path)
    assert code == 1 and "no step of a session" in output, output


def _row(step, loss, skipped=False, time=0.0):
    return StepRow(step, loss, 8.0, skipped, time)


@pytest.mark.parametrize(
    "code, rows, problem",
    [
        (0, [], "no step of a session"),
        (3, [], "it ended before the end of its first step with exit code 3"),
        (3, [_row(1, 0.5)], "it ended after step 1 with exit code 3"),
        (0, [_row(1, 0.5), _row(2, float("nan"))], "the loss of step 2 is nan"),
        (0, [_row(0, float("inf"), skipped=True), _row(1, 0.5)], ""),
    ],
)
def test_what_is_wrong(code, rows, problem):
    found = _describe_problem(code, rows)
    assert found.startswith(problem) and bool(found) == bool(problem)


def test_the_numbers():
    rows = [_row(0, 2.0, True, 10.0), _row(1, 1.5, time=10.5), _row(2, None, time=11.0)]
    assert _describe_training(rows, 1234567) == (
        "loss 2 -> 1.5, skipped 1 of 3 steps, while the loss scale settles, 1,234,567 parameters, 2 steps/s after the "
        "first one"
    )
    assert _describe_training([_row(1, None)], None) == "its loss is not known"
