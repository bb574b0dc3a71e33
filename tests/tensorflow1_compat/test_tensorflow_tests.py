"""`tools/tensorflow_tests.py`: tests in a checkout of TensorFlow run twice, are compared, and are kept."""

from __future__ import annotations

import json
import pathlib
import subprocess
import sys

import pytest

from tests.loose_code import module_at
from tests.npu_run.launching import write_script

REPOSITORY = pathlib.Path(__file__).resolve().parents[2]
TOOL = module_at("tools/tensorflow_tests.py")

# Tests of TensorFlow say which they are as these do. `__tf1__` is there where `npu-run` has compiled the file.
MANY = """
import sys
from absl.testing import absltest
IS_HERE = "npu_bridge" in sys.modules
class Cell(absltest.TestCase):
    def testGood(self): pass
    def testBad(self): self.assertEqual(1, 2 if IS_HERE else 1)
    def testMissing(self):
        if IS_HERE: raise AttributeError("many_test.py:7: tf.contrib.x is not available under npu-run. Use y.")
    def testBadThere(self): self.assertTrue(IS_HERE)
    def testLeftOut(self): self.skipTest("no GPU")
    def testParts(self):
        for at in range(2):
            with self.subTest(f"part_{at}"): self.assertTrue(at or not IS_HERE)
if __name__ == "__main__": absltest.main()
"""
ENDLESS = MANY.replace("def testParts(self):", "def testParts(self):\n        import time; time.sleep(600)")


@pytest.fixture(scope="module")
def checkout(tmp_path_factory):
    folder = tmp_path_factory.mktemp("checkout")
    for name, text in (
        ("contrib/rnn/python/many_test.py", MANY),
        ("contrib/seq2seq/endless_test.py", ENDLESS),
        ("python/layers/broken_test.py", "import no_such_module\n"),
        ("contrib/unused/other_test.py", "raise SystemExit(3)\n"),
    ):
        write_script(folder, text, f"tensorflow/{name}")
    return folder


def run(checkout, *arguments):
    command = [sys.executable, REPOSITORY / "tools/tensorflow_tests.py", checkout, "--python", sys.executable]
    done = subprocess.run([*command, "--limit", "20", *arguments], capture_output=True, text=True, check=True)
    return done.stdout, done.stderr


@pytest.mark.slow("runs tests of TensorFlow")
def test_two_sides_are_compared_and_kept(checkout, tmp_path):
    cache = tmp_path / "out" / "found.json"
    printed, progress = run(checkout, "--cache", cache)
    rows = [line for line in printed.splitlines() if line.startswith("| `")]
    assert rows == [
        "| `contrib.rnn` | 6 | 4 | 1 | 1 | 25 % |",
        "| `contrib.seq2seq` | 6 | 3 | 1 | 0 | 33 % |",
    ]
    assert "AssertionError: 1 != 2\n        contrib.rnn many_test:Cell.testBad" in printed
    assert "AttributeError: tf.contrib.x is not available\n" in printed
    found = json.loads(cache.read_text())
    many = "tensorflow/contrib/rnn/python/many_test.py"
    assert {name: status for name, (status, _) in found["genuine"][many].items()} == {
        "Cell.testGood": "pass", "Cell.testBad": "pass", "Cell.testMissing": "pass", "Cell.testParts": "pass",
        "Cell.testBadThere": "fail", "Cell.testLeftOut": "skip",
    }  # fmt: skip
    assert found["here"][many]["Cell.testParts"][0] == "fail"
    endless = found["here"]["tensorflow/contrib/seq2seq/endless_test.py"]
    assert endless["Cell.testParts"] == ["fail", "not done after 20 s"] and endless["Cell.testGood"][0] == "pass"
    broken = found["here"]["tensorflow/python/layers/broken_test.py"]
    assert broken == {"": ["fail", "exit code 1: ModuleNotFoundError: No module named 'no_such_module'"]}
    assert not any("unused" in file for side in found.values() for file in side)
    assert len(progress.splitlines()) == 6

    again, progress = run(checkout, "--cache", cache, "--only", "contrib/rnn")
    assert progress == "" and rows[0] in again and "seq2seq" not in again
    _, progress = run(checkout, "--cache", cache, "--only", "contrib/rnn", "--again")
    assert "here tensorflow/contrib/rnn/python/many_test.py: 2 of 6 pass" in progress


@pytest.mark.parametrize(
    ("path", "module"),
    [
        ("tensorflow/contrib/rnn/python/kernel_tests/rnn_cell_test.py", "contrib.rnn"),
        ("tensorflow/contrib/layers/python/layers/feature_column_test.py", "contrib.layers (old feature columns)"),
        ("tensorflow/contrib/seq2seq/python/decoder_v2_test.py", "contrib.seq2seq (classes for version 2)"),
        ("tensorflow/python/training/adam_test.py", "python.training"),
    ],
)
def test_module_of(path, module):
    assert TOOL.module_of(path) == module
