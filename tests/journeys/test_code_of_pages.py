"""The code of the README and of pages of docs runs unchanged, alone and on two ranks."""

from __future__ import annotations

import pathlib
import re
import sys

import pytest
import tensorflow as tf

from tests.canaries import of_keras3
from tests.journeys.test_readme import SCRIPT_OUTPUT, lines_that_are_not_in, run

REPOSITORY = pathlib.Path(__file__).parents[2]
PAGES = {
    "readme": "README.md",
    **{
        name: f"docs/{name}.md"
        for name in (
            *("keras", "session", "reporting", "amp", "ranks", "elastic", "stages_accumulate"),
            *("first_distributed", "checkpoints", "loss_scale"),
        )
    },
}
PIECES = {
    f"{name}_{number}": piece
    for name, page in PAGES.items()
    for number, piece in enumerate(re.findall(r"```python\n(.*?)```", (REPOSITORY / page).read_text(), re.DOTALL))
}

WEIGHTS = """
import hashlib
print("weights", hashlib.sha256(b"".join(array.tobytes() for array in weights)).hexdigest())
"""
EAGER_PIECES = """
import npu_bridge.npu_init as npu, tensorflow as tf
import keras_0, keras_1
tf.keras.mixed_precision.set_global_policy("float32")
import keras_4, keras_5, reporting_2, amp_0, amp_1, amp_2, amp_3, elastic_1
import stages_accumulate_0, stages_accumulate_1, loss_scale_0, loss_scale_2, loss_scale_4, loss_scale_5
import readme_2, first_distributed_1, checkpoints_0
if npu.get_rank_size() == 1:
    import first_distributed_0, keras_2
weights = [*keras_0.model.get_weights(), *keras_4.model.get_weights()]
"""
KERAS3_PIECE = "keras_3"
if of_keras3.IS_BESIDE:
    EAGER_PIECES += f"import {KERAS3_PIECE}\n"
# A script is one of TensorFlow 1 or of TensorFlow 2, so these have a process of their own. The last piece about Keras
# switches eager execution off, and has closed its session.
GRAPH_PIECES = """
import keras_6, tensorflow as tf
weights = keras_6.weights
with tf.Graph().as_default():
    import readme_1
import readme_0
import ranks_0
import session_0, session_1, session_2
import reporting_0, reporting_1
import checkpoints_1, loss_scale_1, loss_scale_3, elastic_0
"""


@pytest.mark.slow("all pages; those of the README are fast in test_first_hour.py")
@pytest.mark.parametrize(
    "command", [[sys.executable], pytest.param(["npu-run", "-np", "2"], marks=pytest.mark.ranks(2))], ids=["alone", "2"]
)
def test_code_runs_as_it_stands(command, tmp_path):
    """One process for many: pieces have a model, a graph or a session each."""
    graphs = tmp_path / "graphs"
    graphs.mkdir()
    ranks = 1 if command == [sys.executable] else 2
    imported = set(re.findall(r"\b[a-z_]+_\d\b", EAGER_PIECES + GRAPH_PIECES))
    assert imported | {KERAS3_PIECE} == set(PIECES), "a piece of a page is run nowhere, or is gone"
    for name, piece in PIECES.items():
        ((graphs if name in GRAPH_PIECES else tmp_path) / f"{name}.py").write_text(piece)
    (tmp_path / "train.py").write_text(EAGER_PIECES + WEIGHTS)
    (graphs / "train.py").write_text(GRAPH_PIECES + WEIGHTS)
    eager, printed = (run([*command, "train.py"], folder) for folder in (tmp_path, graphs))
    check_keras(eager + printed, ranks)
    check_levels(eager)
    check_session(printed, str(graphs / "out" / "monitored"))
    check_reports({"pictured": 80, "monitored_report": 40}, graphs / "out")
    check_reports({"fitted": 16}, tmp_path / "out")
    check_that_ranks_are_one_training(eager + printed, graphs / "out", ranks)
    check_readme(eager + printed, ranks)
    check_guides(eager, printed, tmp_path, graphs / "out", ranks)


def check_keras(printed, ranks):
    for expected in (r"skipped 0 scale 32768\.0$", r"^loss \d+\.\d+", r"loss: \d+\.\d+"):
        assert re.search(expected, printed, re.MULTILINE), printed
    weights = re.findall(r"weights (\w{64})", printed)
    assert len(weights) == 2 * ranks and len(set(weights)) == 2, printed


def check_that_ranks_are_one_training(printed, out, ranks):
    assert "train apart" not in printed, printed
    latest = {name: tf.train.latest_checkpoint(str(out / name)) for name in ("line", "together")}
    assert latest["line"].endswith("-100") and latest["together"].endswith("-8" if ranks == 1 else "-5"), latest


def check_readme(printed, ranks):
    if ranks == 2:
        assert lines_that_are_not_in(printed, SCRIPT_OUTPUT) == []
    assert re.search(r"step 100/100", printed)
    assert not re.search(r"\[rank 1\] step \d+/", printed), "rank 0 speaks alone"
    assert re.search(r"^loss [0-7]\.\d+ at loss scale 65536\.0$", printed, re.MULTILINE)
    assert re.search(r"^rank 0 skipped 0 steps$", printed, re.MULTILINE)


def check_guides(eager, printed, folder, out, ranks):
    """The guides' promises hold: equal losses, ranks that stop together, an error that names the operator."""
    held_out = [float(loss) for loss in re.findall(r"held-out loss (\S+)", eager)]
    assert len(held_out) == (2 if ranks == 1 else 1) and max(held_out) - min(held_out) < 1e-3
    assert all((folder / f"{name}.keras").exists() for name in ("first", "best", "resumed"))
    ends = re.findall(r"stopped after epoch (\d+) best epoch (\d+)", eager)
    assert len(ends) == ranks and len(set(ends)) == 1 and int(ends[0][0]) == int(ends[0][1]) + 3
    for rows, batches in ((64 // ranks, 1), (8 // ranks, 8)):
        assert f"rows {rows} x ranks {ranks} x batches {batches} updates 16" in eager
    assert re.findall(r"skipped (\d+) updates (\d+)", eager) == [("5", "0")] * ranks
    assert float(re.search(r"right (\S+) skipped", eager)[1]) > 0.8
    if ranks == 1:
        reached, last = map(int, re.search(r"went on from step (\d+) to (\d+)", eager).groups())
        assert 0 < reached == last - 56 and re.search(r"kinds \[.*\] expected \[", eager)
    assert "stopped early, at step" in printed and (folder / "resumed.keras").exists()
    stopped = int(re.search(r"stopped at step (\d+)", printed)[1])
    assert 40 <= stopped - int(re.search(r"best checkpoint is of step (\d+)", printed)[1]) <= 42
    assert (out / "stopped" / "export" / "best" / "best.json").exists()
    assert tf.train.latest_checkpoint(str(out / "stopped")).endswith(f"-{stopped}"), "all ranks stopped there"
    errors = re.findall(
        r"5 steps in a row were skipped.*The first NaN or Inf comes from Log .*loss_scale_3\.py:\d+", printed
    )
    assert len(errors) == ranks
    page = (out / "pictured" / "report.html").read_text()
    assert "the training resumed from a checkpoint" in page and 'data-last-step="80"' in page
    guide = (REPOSITORY / "docs" / "reporting.md").read_text()
    (guide,) = re.findall(r"^## How to read it\n(.*?)^## ", guide, re.MULTILINE | re.DOTALL)
    words = re.findall(r"^\| (\w[\w ]+) \| |^- \*\*(.+?)\.\*\*", guide, re.MULTILINE)
    assert len(words) == 21
    for word in words:
        assert "".join(word) in page or "".join(word) in ("box", "section", "Learning rate"), word


def check_levels(printed):
    for expected in (r"^level O2 float16 float32$", r"^level O3 float16$"):
        assert re.search(expected, re.sub(r"(?m)^\[.*?\] ?", "", printed), re.MULTILINE), printed


def check_session(printed, folder):
    assert re.search(r"step 50 loss (0\.\d+)", printed), printed
    assert re.search(r"step 40/40 \(100 %\) \| loss [0-9.e-]+ \| .*loss scale 2\^16", printed)
    assert re.search(r"weight 2\.9\d+", printed)
    assert tf.train.latest_checkpoint(folder).endswith("model.ckpt-40")
    assert {name for name, _ in tf.train.list_variables(folder)} >= {"weight", "weight/Momentum", "loss_scale"}


def check_reports(steps_of_folders, out):
    for folder, steps in steps_of_folders.items():
        assert f'data-last-step="{steps}"' in (out / folder / "report.html").read_text()
    for numbers in out.glob("*/numbers.csv"):
        assert numbers.read_text().startswith("step,loss,loss_scale,") and numbers.read_text().count("\n") >= 5
    assert all(picture.read_bytes().startswith(b"\x89PNG") for picture in out.glob("*/training.png"))
