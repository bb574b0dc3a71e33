"""Names of `tf.contrib` that `test_genuine.py` does not compare, and some that it does. They share one process."""

from __future__ import annotations

import ast
import json
import pathlib
import subprocess
import sys

import pytest

REPOSITORY = pathlib.Path(__file__).resolve().parents[2]
CASES = [
    f"{path.stem}.{node.name}"
    for path in sorted((pathlib.Path(__file__).parent / "contrib_cases").glob("of_*.py"))
    for node in ast.parse(path.read_text()).body
    if isinstance(node, ast.FunctionDef) and node.name.startswith("case_")
]


@pytest.fixture(scope="module")
def failures():
    done = subprocess.run(
        [sys.executable, "-m", "tests.tensorflow1_compat.contrib_cases.run"],
        cwd=REPOSITORY, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.parametrize("case", CASES)
def test_contrib(case, failures):
    assert failures[case] is None, failures[case]
