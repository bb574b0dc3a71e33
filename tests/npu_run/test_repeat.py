"""`npu-run --repeat`: runs of a job, of which each leaves a folder of its own."""

from __future__ import annotations

import functools
import json
import os
from pathlib import Path

import pytest

from npu_run.errors import LaunchError
from npu_run.repeat import Repeats


def fake_run(rows):
    """Stands for the ranks: writes a history with these rows to the folder it is given."""

    def run(arguments):
        folder = os.environ["NPU_RUN_OUT"]
        assert arguments == [f"--model_dir={folder}"]
        assert os.environ["NPU_RUN_TRIAL"] == Path(folder, "trial.json").read_text()
        number = int(folder[-1])
        with open(f"{folder}/history.jsonl", "w") as file:
            for step, loss in rows(number):
                row = {"step": step, "loss": loss, "loss_scale": 1, "skipped": False, "time": 0}
                file.write(json.dumps(row) + "\n")
        seen.append({name: os.environ.get(name) for name in ("TF_ENABLE_ONEDNN_OPTS", "TF_NUM_INTRAOP_THREADS")})
        return 0

    seen = run.seen = []
    return run


def repeated(folder, vary, rows, count=4):
    said, run = [], fake_run(rows)
    before = dict(os.environ)
    assert Repeats(count, vary, str(folder)).run(["--model_dir={out}"], run, said.append) == 0
    assert dict(os.environ) == before
    return run.seen, said


def test_order_changes_kernels_and_threads_only(tmp_path, monkeypatch):
    for name in ("TF_ENABLE_ONEDNN_OPTS", "TF_NUM_INTRAOP_THREADS"):
        monkeypatch.delenv(name, raising=False)
    seen, said = repeated(tmp_path, "order", lambda number: [(1, 2.0 + number)])
    assert seen[0] == {"TF_ENABLE_ONEDNN_OPTS": None, "TF_NUM_INTRAOP_THREADS": None}
    assert len({tuple(each.values()) for each in seen}) == 4, seen
    assert said[-1].startswith("repeats: 4 runs of 1 steps; the last loss is 3.5 +- 1.3")


@pytest.mark.parametrize(
    "vary, said", [("seed", "seeds + 1"), ("rounding", "initial weights rounded otherwise (draw 1)")]
)
def test_a_repeat_differs_in_what_varies_alone(tmp_path, vary, said):
    lines = repeated(tmp_path, vary, lambda number: [(1, 2.0 + number)], count=2)[1]
    trials = [json.loads((tmp_path / f"repeat-{number}" / "trial.json").read_text()) for number in (0, 1)]
    changed = {name: value for name, value in trials[1].items() if value != trials[0][name]}
    assert changed == {"folder": str(tmp_path / "repeat-1"), vary: 1} and trials[0]["seed"] == 0
    assert lines[1].startswith(f"repeat 1, {said}, in ")


@pytest.mark.parametrize(
    "rows, said",
    [
        (lambda number: [], "no losses were seen"),
        (lambda number: [(1 + 5 * number, 2.0), (2 + 5 * number, 1.0)], "repeat 1 began at step 6, repeat 0 at 1"),
        (lambda number: [(1, 2.0)], "--vary seed changed no loss of repeat 1, 2, 3"),
    ],
)
def test_what_is_odd_about_repeats_is_said(tmp_path, rows, said):
    assert said in "\n".join(repeated(tmp_path, "seed", rows)[1])


def test_only_folders_of_repeats_are_emptied(tmp_path):
    def one_step(number, checkpoint=None):
        if checkpoint:
            Path(os.environ["NPU_RUN_OUT"], checkpoint).write_text("of this run")
        return [(1, 1.0)]

    repeated(tmp_path / "out", "seed", functools.partial(one_step, checkpoint="model.ckpt"))
    repeated(tmp_path / "out", "seed", one_step)
    assert not (tmp_path / "out" / "repeat-1" / "model.ckpt").exists()
    (tmp_path / "out" / "repeat-1" / "thesis.txt").write_text("years")
    with pytest.raises(LaunchError, match=r"holds 'repeat-1/thesis.txt', which npu-run did not make"):
        repeated(tmp_path / "out", "seed", one_step)
    assert (tmp_path / "out" / "repeat-1" / "thesis.txt").exists()
    assert (tmp_path / "out" / "repeat-0" / "history.jsonl").exists(), "nothing was begun"
    (tmp_path / "mine" / "repeat-0").mkdir(parents=True)
    (tmp_path / "mine" / "repeat-0" / "thesis.txt").write_text("years")
    with pytest.raises(LaunchError, match=r"mine holds 'repeat-0', which npu-run did not make"):
        repeated(tmp_path / "mine", "seed", lambda number: [(1, 1.0)])
    assert (tmp_path / "mine" / "repeat-0" / "thesis.txt").exists()
