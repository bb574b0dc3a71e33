"""`npu-run --repeat`: real jobs, of which each leaves a run folder of its own."""

from __future__ import annotations

import functools
import json
import os
from pathlib import Path

import numpy as np
import pytest

from npu_run.errors import LaunchError
from npu_run.repeat import Repeats
from tests.npu_run.launching import needs_horovod, npu_run, write_script
from tests.npu_run.trials.running import losses_in

TRAIN = """
import os, sys
assert "tensorflow" not in sys.modules and not any(name.startswith("NPU_RUN_TRIAL") for name in os.environ)
import tensorflow.compat.v1 as tf
tf.disable_eager_execution()
from npu_bridge.npu_init import FixedLossScaleManager, NPUOptimizer, get_rank_id
assert os.environ["NPU_RUN_OUT"] == sys.argv[1]
rank = get_rank_id()
inputs = tf.random.normal([16, 8])
loss = tf.reduce_mean(tf.square(tf.layers.dense(inputs, 4) - 1.0))
inner = tf.train.AdamOptimizer(0.01)
train = NPUOptimizer(inner, FixedLossScaleManager(8.0), is_distributed=True, is_loss_scale=True).minimize(loss)
with tf.Session() as session:
    session.run(tf.global_variables_initializer())
    for _ in range(6):
        value = session.run([inputs, train])[0]
    sys.stdout.write(f"rank {rank} has drawn {value.sum()}\\n")
"""


@pytest.mark.slow("three trainings on two ranks")
@needs_horovod
def test_repeats_differ_by_a_rounding_on_two_ranks(tmp_path):
    write_script(tmp_path, TRAIN)
    code, output = npu_run(
        *("-np", 2, "--repeat", 2, "--vary", "rounding", "--out", "noise", "train.py", "{out}"), cwd=tmp_path
    )
    assert code == 0
    assert "repeat 1, initial weights rounded otherwise (draw 1), in noise/repeat-1" in output
    assert "repeats: 2 runs of 6 steps; the last loss is" in output
    losses = np.array([losses_in(tmp_path / "noise" / f"repeat-{number}") for number in (0, 1)])
    assert losses.shape == (2, 6) and (losses[0] != losses[1]).any() and np.allclose(*losses, rtol=1e-4)
    drawn = {rank: [line for line in output.splitlines() if f"rank {rank} has drawn" in line] for rank in (0, 1)}
    assert len(set(drawn[0])) == len(set(drawn[1])) == 1  # numbers are those of the repeat before
    assert drawn[0][0].split()[-1] != drawn[1][0].split()[-1]  # and other ones on each rank


def fake_run(rows):
    """Stands for the ranks: writes a history with these rows to the folder it is given."""

    def run(arguments):
        folder = os.environ["NPU_RUN_OUT"]
        assert arguments == [f"--model_dir={folder}"] and json.loads(os.environ["NPU_RUN_TRIAL"])["folder"] == folder
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
