"""The notebooks run as they stand, show pictures, and keep their progress in one line."""

from __future__ import annotations

import base64
import os
import pathlib
import re
import subprocess
import sys

import pytest

nbformat = pytest.importorskip("nbformat", reason="nbconvert is not installed; `make venv` brings it")

FOLDER = pathlib.Path(__file__).parents[2] / "examples" / "notebooks"
NAMES = sorted(path.name for path in FOLDER.glob("*.ipynb"))
LIMIT_SECS = 600


@pytest.fixture(scope="module")
def executed(tmp_path_factory):
    """All notebooks, executed anew at once, by name."""
    out = tmp_path_factory.mktemp("notebooks")
    scripts = pathlib.Path(sys.executable).parent
    own = {name: str(out / name.lower()) for name in ("IPYTHONDIR", "JUPYTER_RUNTIME_DIR", "JUPYTER_CONFIG_DIR")}
    environment = {**os.environ, **own, "PYTHONPATH": str(FOLDER.parents[1])}
    environment.pop("TF_AUTO_MIXED_PRECISION_GRAPH_REWRITE_EMULATE_FP16", None)  # of other tests; it draws a warning
    environment["PATH"] = f"{scripts}{os.pathsep}{os.environ['PATH']}"
    command = [sys.executable, "-m", "nbconvert", "--to", "notebook", "--execute", f"--output-dir={out}"]
    pipes = {"env": environment, "stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    started = [subprocess.Popen([*command, str(FOLDER / name)], **pipes) for name in NAMES]
    for name, process in zip(NAMES, started):
        printed, _ = process.communicate(timeout=LIMIT_SECS)
        assert process.returncode == 0, f"{name}\n{printed[-6000:]}"
    return {name: nbformat.read(out / name, as_version=4) for name in NAMES}


def outputs_of(notebook):
    return [output for cell in notebook.cells for output in cell.get("outputs", ())]


def pictures_of(notebook):
    found = [output.data for output in outputs_of(notebook) if "data" in output]
    return [base64.b64decode(data["image/png"]) for data in found if "image/png" in data]


def text_of(notebook):
    """Returns the final text: of a line that was written over, its last state."""
    text = "".join(output.text for output in outputs_of(notebook) if output.output_type == "stream")
    return re.sub(r"^.*\r(?=[^\n])", "", text.replace("\r\n", "\n"), flags=re.MULTILINE)


@pytest.mark.slow("runs two notebooks")
@pytest.mark.ranks(2)
def test_they_run_and_show_pictures(executed):
    assert NAMES == ["estimator.ipynb", "keras.ipynb"]
    for notebook in executed.values():
        assert pictures_of(notebook) and all(len(picture) > 2000 for picture in pictures_of(notebook))
    of_estimator, of_keras = map(text_of, executed.values())
    assert float(re.search(r"accuracy (0\.\d+)", of_estimator)[1]) > 0.8
    assert int(re.search(r"skipped (\d+) of", of_estimator)[1]) > 3
    assert "starting 2 ranks of train.py" in of_keras and len(re.findall(r"^Epoch 4/4", of_keras, re.MULTILINE)) == 2


@pytest.mark.slow("runs a notebook")
@pytest.mark.ranks(2)
def test_progress_is_one_line_that_is_rewritten(executed):
    notebook = executed["estimator.ipynb"]
    written = "".join(output.text for output in outputs_of(notebook) if output.output_type == "stream")
    assert len(re.findall(r"step \d+/400", written)) > 2
    assert re.findall(r"^step \d+/400", text_of(notebook), re.MULTILINE) == ["step 400/400"]
    assert [output for output in outputs_of(notebook) if output.get("name") == "stderr"] == [], "it would be red"


@pytest.mark.parametrize("name", NAMES)
def test_the_kept_outputs_are_small_and_whole(name):
    notebook = nbformat.read(FOLDER / name, as_version=4)
    nbformat.validate(notebook)
    pictures = pictures_of(notebook)
    assert pictures and max(map(len, pictures)) < 60_000
    assert all(cell.execution_count for cell in notebook.cells if cell.cell_type == "code")
    assert "/home/" not in text_of(notebook) and "\r" not in text_of(notebook)
