"""The example as a user runs it on one process: train and resume."""

from __future__ import annotations

import pytest
import tensorflow as tf

from npu_bridge.reporting import History, summarize
from tests.examples.conftest import EXAMPLE

# Small rows, so that one run is little more than the start of TensorFlow.
SMALL = ["--max_seq_length=16", "--train_batch_size=4", "--num_eval_batches=1", "--save_checkpoints_steps=4"]


@pytest.fixture
def train(warm_python, tmp_path):
    """Runs the script into one folder; returns what it printed and the summary of its history."""
    out = tmp_path / "out"

    def run(*flags):
        done = warm_python.run([EXAMPLE / "train.py", f"--output_dir={out}", *SMALL, *flags], tmp_path)
        assert done.returncode == 0, done.stderr[-4000:]
        return done.stdout, summarize(History(str(out / "history.jsonl"))), out

    return run


@pytest.mark.slow("two trainings; one of two steps is fast in test_first_minutes.py")
def test_train_then_continue(train):
    printed, first, out = train("--num_train_steps=6")
    assert (first.ranks, first.steps, first.loss_scale) == (1, 6, 65536.0)
    assert "step 6/6 (100 %)" in printed
    assert "evaluation 'held-out text' at step 6 | loss " in printed
    assert (out / "training.png").read_bytes().startswith(b"\x89PNG")

    printed, second, _ = train("--num_train_steps=9")
    assert "step 7/9 (77 %)" in printed
    assert "step 6/9" not in printed
    assert (second.steps, second.first_loss) == (9, first.first_loss)


@pytest.mark.slow("another training of the small BERT")
def test_without_loss_scaling_there_is_no_scale_and_stages_come_from_a_file(train, tmp_path):
    (tmp_path / "run.toml").write_text("[[stages]]\nstage = 'Accumulate'\nsteps = 2\n")
    flags = ["--num_train_steps=2", "--npu_bert_loss_scale=-1", "--num_eval_batches=0", "--stages=run.toml"]
    printed, summary, out = train(*flags)
    assert summary.steps == 2 and any("accumulated" in name for name, _ in tf.train.list_variables(str(out)))
    assert summary.loss_scale is None
    assert "loss scale" not in printed
    assert "held-out" not in printed
