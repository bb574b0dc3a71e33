"""The code of docs/estimator.md runs unchanged, alone and on two ranks, and resumes where it ended."""

from __future__ import annotations

import contextlib
import io
import os
import re

import pytest
import tensorflow as tf

from tests.loose_code import cut_pieces

EXAMPLES = cut_pieces("docs/estimator.md")


def run_pieces(folder, numbers=(0, 1, 2)):
    """Runs pieces in a folder; gives what each printed, on standard output and on standard error."""
    before, printed = os.getcwd(), []
    os.chdir(folder)
    try:
        for number in numbers:
            out, err = io.StringIO(), io.StringIO()
            with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
                exec(EXAMPLES[number], {})
            printed.append((out.getvalue(), err.getvalue()))
    finally:
        os.chdir(before)
    return printed


def check(folder, printed):
    (whole, progress), (outputs, quiet), (keras, _) = printed
    assert float(re.search(r"error (\d+\.\d+)", whole).group(1)) < 0.8 and "sum " in whole
    assert tf.saved_model.contains_saved_model(os.path.join(folder, re.search(r"exported (\S+)", whole).group(1)))
    assert re.search(r"^step 100/100 \(100 %\) \| loss ", progress, re.MULTILINE)
    assert outputs.count("mean of 10 losses") == 2 and "step " not in quiet
    summaries = os.listdir(os.path.join(folder, "out", "host"))
    assert len(summaries) == 1
    assert float(re.search(r"loss (\S+)", keras).group(1)) < 0.1 and "trained" in keras
    for name, step in (("sum", 100), ("weight", 20), ("keras", 40), ("plain", 40)):
        assert tf.train.latest_checkpoint(os.path.join(folder, "out", name)).endswith(f"model.ckpt-{step}")


def test_alone(tmp_path):
    check(tmp_path, run_pieces(tmp_path))
    ((again, progress),) = run_pieces(tmp_path, [0])
    assert "error" in again and "nothing to do" in progress and not re.search(r"^step ", progress, re.MULTILINE), (
        "it has reached its last step"
    )


@pytest.mark.slow("the page runs on one rank, too")
def test_on_two_ranks(on_ranks, tmp_path):
    of_rank_0, of_rank_1 = on_ranks(2, run_pieces, str(tmp_path))
    check(tmp_path, of_rank_0)
    assert [err for _, err in of_rank_1 if re.search(r"^step ", err, re.MULTILINE)] == [], "rank 0 speaks alone"
    assert "error" not in of_rank_1[0][0] and "trained" in of_rank_1[2][0]
