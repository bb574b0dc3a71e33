"""`tools/draw.py`: a draw is the same for the same seed, and lists the files that train."""

from __future__ import annotations

import subprocess
import sys

import pytest

from tests.loose_code import module_at

TOOL = module_at("tools/draw.py")
TRAINS = "import tensorflow\nx.minimize(y)"


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    place = tmp_path_factory.mktemp("place")
    texts = {f"TensorFlow/cv/{name}_for_TensorFlow/src/model.py": TRAINS for name in "abcd"}
    texts["TensorFlow/cv/reads/README.md"] = "text"
    texts["TensorFlow/cv/reads/run/train.py"] = TRAINS
    texts["TensorFlow/cv/reads/run/data.py"] = "import tensorflow"
    texts["TensorFlow/cv/infers/README.md"] = "no training"
    texts["Elsewhere/other/train.py"] = TRAINS
    for path, text in texts.items():
        (place / path).parent.mkdir(parents=True, exist_ok=True)
        (place / path).write_text(text)
    return place


def test_a_draw_is_repeatable_and_finds_projects(place):
    names = {path.name for path in TOOL.projects(place, ("TensorFlow",))}
    assert names == {*(f"{name}_for_TensorFlow" for name in "abcd"), "reads"}
    drawn = [TOOL.draw(place, ("TensorFlow",), 3, seed) for seed in (1, 1, 2, 3)]
    assert drawn[0] == drawn[1] and any(other != drawn[0] for other in drawn[2:])


def test_files_that_train_are_listed(place):
    command = [sys.executable, TOOL.__file__, "5", "--seed", "1", "--top", "TensorFlow", place]
    printed = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True).stdout
    assert "TensorFlow/cv/reads\n  run/train.py\n" in printed and "data.py" not in printed
