"""The code of docs/keras.md runs as it stands, alone and under `npu-run`, where all ranks end with the same weights."""

from __future__ import annotations

import os
import pathlib
import re
import subprocess
import sys

import pytest

REPOSITORY = pathlib.Path(__file__).parents[2]
EXAMPLES = re.findall(r"```python\n(.*?)```", (REPOSITORY / "docs" / "keras.md").read_text(), re.DOTALL)
SCRIPTS = pathlib.Path(sys.executable).parent
EXPECTED = [r"32768\.0 0 0\.001", r"loss \d+\.\d+", r"loss: \d+\.\d+"]

# The last piece switches eager execution off, and has closed its session.
ALL_PIECES = """
import hashlib
import piece_0, piece_1
weights = [*piece_0.model.get_weights(), *piece_1.model.get_weights()]
import piece_2
print("weights", hashlib.sha256(b"".join(array.tobytes() for array in [*weights, *piece_2.weights])).hexdigest())
"""


@pytest.mark.parametrize(
    "command", [[sys.executable], pytest.param(["npu-run", "-np", "2"], marks=pytest.mark.ranks(2))], ids=["alone", "2"]
)
def test_code_runs_as_it_stands(command, tmp_path):
    """One process for the whole page: pieces have a model each."""
    assert len(EXAMPLES) == len(EXPECTED)
    for number, example in enumerate(EXAMPLES):
        (tmp_path / f"piece_{number}.py").write_text(example)
    (tmp_path / "train.py").write_text(ALL_PIECES)
    environment = {**os.environ, "PYTHONPATH": f"{REPOSITORY}{os.pathsep}{tmp_path}"}
    environment["PATH"] = f"{SCRIPTS}{os.pathsep}{environment['PATH']}"
    done = subprocess.run(
        [*command, "train.py"], cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=200
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    for expected in EXPECTED:
        assert re.search(expected, done.stdout), done.stdout
    weights = re.findall(r"weights (\w+)", done.stdout)
    assert len(weights) == (1 if command == [sys.executable] else 2) and len(set(weights)) == 1, done.stdout
