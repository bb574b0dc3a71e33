"""A script as the documentation of NPUOptimizer has them: flags choose the manager and the branch."""

from __future__ import annotations

import pathlib

import pytest

SCRIPT = pathlib.Path(__file__).parent / "scripts" / "npu_optimizer_flags.py"
REPOSITORY = SCRIPT.parent.parent.parent.parent


@pytest.mark.parametrize(
    "flags, expected",
    [
        (["--npu_bert_loss_scale=0"], "scale 65536.0 -> 131072.0"),
        (["--npu_bert_loss_scale=1024"], "scale 1024.0 -> 1024.0"),
        (["--npu_bert_loss_scale=-1"], "scale None -> None"),
        (["--npu_bert_loss_scale=0", "--distributed=True", "--npu_bert_npu_tail_optimize=True"], "-> 131072.0"),
    ],
    ids=["dynamic", "fixed", "off", "distributed and tailed"],
)
def test_every_branch_trains(warm_python, flags, expected):
    run = warm_python.run([SCRIPT, *flags], REPOSITORY)
    assert run.returncode == 0, run.stderr
    assert expected in run.stdout
    assert "loss fell: True" in run.stdout


def test_an_impossible_scale_is_refused(warm_python):
    run = warm_python.run([SCRIPT, "--npu_bert_loss_scale=0.5"], REPOSITORY)
    assert run.returncode != 0 and "ValueError" in run.stderr
