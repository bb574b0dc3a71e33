"""The code of five pages of docs and the README's Estimators run as they stand, alone and on two ranks."""

from __future__ import annotations

import os
import pathlib
import re
import subprocess
import sys

import pytest
import tensorflow as tf

REPOSITORY = pathlib.Path(__file__).parents[2]
SCRIPTS = pathlib.Path(sys.executable).parent
README, KERAS, SESSION, REPORTING, AMP, RANKS = (
    re.findall(r"```python\n(.*?)```", (REPOSITORY / page).read_text(), re.DOTALL)
    for page in ("README.md", "docs/keras.md", "docs/session.md", "docs/reporting.md", "docs/amp.md", "docs/ranks.md")
)

WEIGHTS = """
import hashlib
print("weights", hashlib.sha256(b"".join(array.tobytes() for array in weights)).hexdigest())
"""
EAGER_PIECES = """
import keras_0, keras_1, reporting_2, amp_0, amp_1, amp_2
weights = [*keras_0.model.get_weights(), *keras_1.model.get_weights()]
"""
# A script is one of TensorFlow 1 or of TensorFlow 2, so these have a process of their own. The last piece about Keras
# switches eager execution off, and has closed its session.
GRAPH_PIECES = """
import keras_2
weights = keras_2.weights
import readme_1, readme_2
import ranks_0
import session_0, session_1, session_2
import reporting_0, reporting_1
"""


@pytest.mark.parametrize(
    "command", [[sys.executable], pytest.param(["npu-run", "-np", "2"], marks=pytest.mark.ranks(2))], ids=["alone", "2"]
)
def test_code_runs_as_it_stands(command, tmp_path):
    """One process for many: pieces have a model, a graph or a session each."""
    graphs = tmp_path / "graphs"
    graphs.mkdir()
    pages = {"readme": README, "keras": KERAS, "session": SESSION, "reporting": REPORTING, "amp": AMP}
    assert [len(pieces) for pieces in (*pages.values(), RANKS)] == [3, 3, 3, 3, 3, 1]
    for page, pieces in {**pages, "ranks": RANKS}.items():
        for number, piece in enumerate(pieces):
            is_eager = page == "amp" or (page, number) in (("keras", 0), ("keras", 1), ("reporting", 2))
            ((tmp_path if is_eager else graphs) / f"{page}_{number}.py").write_text(piece)
    (tmp_path / "train.py").write_text(EAGER_PIECES + WEIGHTS)
    (graphs / "train.py").write_text(GRAPH_PIECES + WEIGHTS)
    eager, printed = output_of(command, tmp_path), output_of(command, graphs)
    check_keras(eager + printed, ranks=1 if command == [sys.executable] else 2)
    check_levels(eager)
    check_session(printed, str(graphs / "out" / "monitored"))
    check_reports({"pictured": 60, "monitored_report": 40}, graphs / "out")
    check_reports({"fitted": 16}, tmp_path / "out")
    check_that_ranks_are_one_training(eager + printed, graphs / "out", ranks=1 if command == [sys.executable] else 2)
    assert re.search(r"step 30/30", printed) and not re.search(r"\[rank 1\] step \d+/", printed), "rank 0 speaks alone"


def output_of(command, folder):
    environment = {**os.environ, "PYTHONPATH": f"{REPOSITORY}{os.pathsep}{folder}"}
    environment["PATH"] = f"{SCRIPTS}{os.pathsep}{environment['PATH']}"
    done = subprocess.run(
        [*command, "train.py"], cwd=folder, env=environment, capture_output=True, text=True, timeout=600
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    return done.stdout + done.stderr


def check_keras(printed, ranks):
    for expected in (r"32768\.0 0 0\.001", r"^loss \d+\.\d+", r"loss: \d+\.\d+"):
        assert re.search(expected, printed, re.MULTILINE), printed
    weights = re.findall(r"weights (\w{64})", printed)
    assert len(weights) == 2 * ranks and len(set(weights)) == 2, printed


def check_that_ranks_are_one_training(printed, out, ranks):
    assert "train apart" not in printed, printed
    latest = {name: tf.train.latest_checkpoint(str(out / name)) for name in ("line", "together")}
    assert latest["line"].endswith("-100") and latest["together"].endswith("-8" if ranks == 1 else "-5"), latest


def check_levels(printed):
    for expected in (r"^level O2 float16 float32$", r"^level O3 float16$", r"^level O1 Square$"):
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
