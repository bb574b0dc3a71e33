"""The code of docs/session.md runs as it stands, alone and under `npu-run`."""

from __future__ import annotations

import os
import pathlib
import re
import subprocess
import sys

import pytest
import tensorflow as tf

REPOSITORY = pathlib.Path(__file__).parents[2]
EXAMPLES = re.findall(r"```python\n(.*?)```", (REPOSITORY / "docs" / "session.md").read_text(), re.DOTALL)
SCRIPTS = pathlib.Path(sys.executable).parent


@pytest.mark.parametrize(
    "command", [[sys.executable], pytest.param(["npu-run", "-np", "2"], marks=pytest.mark.ranks(2))], ids=["alone", "2"]
)
def test_code_runs_as_it_stands(command, tmp_path):
    """One process for the whole page: pieces have a graph or a session each."""
    assert len(EXAMPLES) == 3
    for number, example in enumerate(EXAMPLES):
        (tmp_path / f"piece_{number}.py").write_text(example)
    (tmp_path / "train.py").write_text("import piece_0, piece_1, piece_2\n")
    environment = {**os.environ, "PYTHONPATH": f"{REPOSITORY}{os.pathsep}{tmp_path}"}
    environment["PATH"] = f"{SCRIPTS}{os.pathsep}{environment['PATH']}"
    done = subprocess.run(
        [*command, "train.py"], cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=100
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    assert re.search(r"step 50 loss (0\.\d+)", done.stdout), done.stdout
    assert re.search(r"step 40/40 \(100 %\) \| loss [0-9.e-]+ \| .*loss scale 2\^16", done.stdout)
    assert re.search(r"weight 2\.9\d+", done.stdout)
    folder = str(tmp_path / "out" / "monitored")
    assert tf.train.latest_checkpoint(folder).endswith("model.ckpt-40")
    assert {name for name, _ in tf.train.list_variables(folder)} >= {"weight", "weight/Momentum", "loss_scale"}
