"""The code of docs/keras.md runs as it stands."""

from __future__ import annotations

import os
import pathlib
import re
import subprocess
import sys

import pytest

REPOSITORY = pathlib.Path(__file__).parents[2]
EXAMPLES = re.findall(r"```python\n(.*?)```", (REPOSITORY / "docs" / "keras.md").read_text(), re.DOTALL)
EXPECTED = [r"32768\.0 0 0\.001", r"loss \d+\.\d+", r"loss: \d+\.\d+"]


def test_there_are_as_many_pieces_as_expected():
    assert len(EXAMPLES) == len(EXPECTED)


@pytest.mark.parametrize("number", [0, 1], ids=["fit", "a loop of one's own"])
def test_code_runs_as_it_stands(number, capsys):
    exec(compile(EXAMPLES[number], f"piece {number} of docs/keras.md", "exec"), {})
    assert re.search(EXPECTED[number], capsys.readouterr().out)


def test_code_in_a_tf1_graph_runs_as_it_stands(tmp_path):
    """In a process of its own, because it switches eager execution off."""
    environment = {**os.environ, "PYTHONPATH": str(REPOSITORY)}
    done = subprocess.run(
        [sys.executable, "-c", EXAMPLES[2]], cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=200
    )
    assert done.returncode == 0, done.stderr[-4000:]
    assert re.search(EXPECTED[2], done.stdout), done.stdout
