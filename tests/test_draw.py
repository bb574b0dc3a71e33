"""`tools/draw.py`: a draw is the same for the same seed, says what projects want, and runs those with a recipe."""

from __future__ import annotations

import os
import pathlib
import subprocess
import sys

import pytest

from tests.loose_code import module_at

REPOSITORY = pathlib.Path(__file__).resolve().parents[1]
TOOL = module_at("tools/draw.py")

READS = """
import argparse, glob, os, sys
import tensorflow as tf
flags = argparse.ArgumentParser()
flags.add_argument("--data_dir", default="/data")
flags.add_argument("--rate", default=0.1)
def parse(record):
    keys = {"label": tf.FixedLenFeature([], tf.int64)}
    keys["picture"] = tf.FixedLenFeature([2, 3], tf.float32)
    keys["words"] = tf.FixedLenFeature([LENGTH], dtype=tf.int64)
    return tf.parse_single_example(record, keys)
def train():
    files = sorted(glob.glob(sys.argv[1] + "/*.tfrecord"))
    for number, record in enumerate(tf.python_io.tf_record_iterator(files[0])):
        label, picture = tf.train.Example.FromString(record).features.feature["label"], 1.0 / (1 + number)
        print(f"step {number} loss = {picture if len(label.int64_list.value) == 1 else 'nan'}")
    assert os.path.exists("made") and os.environ["NAME"] == sys.argv[1]
if __name__ == "__main__":
    train()
"""
FAILS = "import tensorflow as tf\nprint('loss 1.5')\ntf.estimator.nothing_of_this_name\n"


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    place = tmp_path_factory.mktemp("place")
    texts = {f"TensorFlow/cv/{name}_for_TensorFlow/src/model.py": "import tensorflow\nx.minimize(y)" for name in "abcd"}
    texts["TensorFlow/cv/reads/README.md"] = "text"
    texts["TensorFlow/cv/reads/run/train.py"] = READS + "# .fit(\n"
    texts["TensorFlow/cv/fails/train.py"] = FAILS + "# .minimize(\n"
    texts["TensorFlow/cv/infers/README.md"] = "no training"
    texts["Elsewhere/other/train.py"] = FAILS
    for path, text in texts.items():
        (place / path).parent.mkdir(parents=True, exist_ok=True)
        (place / path).write_text(text)
    return place


def test_a_draw_is_repeatable_and_finds_projects(place):
    names = {path.name for path in TOOL.projects(place, ("TensorFlow",))}
    assert names == {*(f"{name}_for_TensorFlow" for name in "abcd"), "reads", "fails"}
    drawn = [TOOL.draw(place, ("TensorFlow",), 3, seed) for seed in (1, 1, 2, 3)]
    assert drawn[0] == drawn[1] and any(other != drawn[0] for other in drawn[2:])


def test_it_says_what_a_project_wants(place):
    needs = TOOL.data_needs_of(place / "TensorFlow/cv/reads")
    assert needs.flags == {"data_dir": "'/data'"}
    kind = "FixedLenFeature"
    features = {"label": (kind, [], "int64"), "picture": (kind, [2, 3], "float32"), "words": (kind, [8], "int64")}
    assert needs.features == features


@pytest.mark.slow("runs drawn projects")
def test_projects_with_a_recipe_are_run(place, tmp_path):
    (tmp_path / "reads.toml").write_text("""
script = "train.py"
folder = "run"
args = ["{data}"]
features = ["one.tfrecord"]
setup = ["touch made"]
environment = { NAME = "{data}" }
""")
    (tmp_path / "fails.toml").write_text('script = "train.py"\n')
    command = [sys.executable, "tools/draw.py", "6", "--seed", "1", "--top", "TensorFlow", place]
    command += ["--recipes", tmp_path, "--out", tmp_path / "out"]
    done = subprocess.run(
        command, cwd=REPOSITORY, capture_output=True, text=True, check=False,
        env={**os.environ, "PYTHONPATH": str(REPOSITORY)},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    table = (tmp_path / "out/table.md").read_text()
    assert "| TensorFlow/cv/reads | train.py | 1 | trains | 1 to 0.01562 |  |" in table, table
    assert "| TensorFlow/cv/fails | train.py | 1 | does not | 1.5 to 1.5 | AttributeError" in table, table
    assert table.count("no recipe") == 4
