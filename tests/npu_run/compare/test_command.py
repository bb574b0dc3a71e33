"""`npu-run compare` on folders of real trainings: exit codes, sentences, the page, JSON."""

from __future__ import annotations

import json
import re

import click.testing
import numpy as np
import pytest

from npu_run.compare.command import compare
from tests.loose_code import module_at
from tests.reporting.chromium import CHROMIUM, visit
from tests.reporting.test_page import write_history


@pytest.fixture(scope="module")
def pairs():
    return module_at("benchmarks/compare.py")


def run(*arguments, folder=None):
    """Exit code and output of the command, whose page is put into the folder."""
    place = [] if folder is None else ["-o", str(folder / "compare.html")]
    done = click.testing.CliRunner().invoke(compare, [*map(str, arguments), *place], catch_exceptions=False)
    return done.exit_code, done.output


# Model, noise, error: what the command says. Each is a story of a user: a product in bfloat16, a gradient that is a
# thousandth too large, another start, another learning rate, and nothing at all.
PLANTED = {
    ("keras", "rounding", "bfloat16"): r"tensors: outside\. The first operator out of tolerance is '.*MatMul'",
    ("digits", "rounding", "gradient"): r"'chosen_gradient' \(Mul\).*B is 1\.001 times A; its input '\S+' is inside",
    ("rows", "order", "weight"): r"checkpoints: outside\. \S*kernel differs at step 0: .* already in the first",
    ("line", "order", "rate"): r"losses: outside\. B left the band of A at step 5[12] and never came back: loss ",
    ("line", "rounding", ""): r"(losses|tensors|checkpoints): inside\. ",
}


@pytest.mark.few_fast(2, "other errors are placed alike")
@pytest.mark.parametrize("case", PLANTED, ids="-".join)
def test_planted_errors_are_found_named_and_placed(case, pairs, tmp_path, monkeypatch):
    name, noise, error = case
    if error != "rate":
        monkeypatch.setattr(pairs, "STEPS", 24)
    pairs.train_pair(tmp_path, name, noise, 1, error)
    code, printed = run(tmp_path / "a", tmp_path / "b", folder=tmp_path)
    assert code == int(bool(error)), printed
    assert re.search(PLANTED[case], printed), printed
    page = (tmp_path / "compare.html").read_text()
    assert f"b against a: {'outside' if error else 'inside'}" in page and 'data-name="losses"' in page
    assert ('data-name="graph"' in page) == (noise == "rounding" and bool(error))
    if CHROMIUM is not None and error == "gradient":
        document, console = visit(tmp_path / "compare.html", tmp_path / "profile", "--dump-dom")
        assert console == [] and "chosen_gradient" in document


def test_json_has_everything(tmp_path):
    curve = 2 + np.exp(-np.arange(60) / 20)
    random = np.random.RandomState(1)
    for number in range(3):
        write_history(str(tmp_path / f"a/repeat-{number}"), list(curve + 0.01 * random.randn(60)))
    write_history(str(tmp_path / "b"), list(curve + 0.01 * random.randn(60) + np.where(np.arange(60) < 30, 0, 0.5)))
    code, printed = run(tmp_path / "a", tmp_path / "b", "--json", folder=tmp_path)
    found = json.loads(printed)
    assert (code, found["inside"], found["page"]) == (1, False, str(tmp_path / "compare.html"))
    (verdict,) = found["verdicts"]
    assert verdict["facts"]["step"] == 31 and verdict["facts"]["repeats"] == 3
    code, printed = run(tmp_path / "a", tmp_path / "a" / "repeat-1", "--only", "losses", folder=tmp_path)
    assert code == 0 and printed.startswith("losses: inside. B stays in the band of A in all 60 steps from 1 to 60")


def test_what_cannot_be_told_is_two(tmp_path):
    for name, losses in (("a", [3.0, 2.0, 1.0]), ("b", [3.0, 2.1, 1.1])):
        write_history(str(tmp_path / name), losses)
    code, printed = run(tmp_path / "a", tmp_path / "b", folder=tmp_path)
    assert (
        code == 2 and "losses: cannot be told. It cannot be told whether the losses agree: they differ from" in printed
    )
    (tmp_path / "empty").mkdir()
    for other, said in (("empty", "nothing in common that could be compared"), ("nowhere", "There is no")):
        code, printed = run(tmp_path / "a", tmp_path / other, folder=tmp_path)
        assert code == 2 and printed.startswith("cannot be told: ") and said in printed and printed.count("\n") == 1
    for other, said in (("b", "cannot be told whether the losses agree"), ("nowhere", "There is no")):
        code, printed = run(tmp_path / "a", tmp_path / other, "--json", folder=tmp_path)
        assert code == 2 and said in json.loads(printed)["problem"]
    assert run(tmp_path / "a", tmp_path / "b", "--only", "tensors", folder=tmp_path)[0] == 2


def test_a_dump_is_written_in_the_names_of_the_toolchain(tmp_path):
    (tmp_path / "dump").mkdir()
    np.save(tmp_path / "dump" / "one.npy", np.ones(3, np.float32))
    rows = [{"file": "one.npy", "op": "a/b", "type": "Relu", "side": "output", "slot": 0, "dtype": "float32"}]
    (tmp_path / "dump" / "index.json").write_text(json.dumps({"step": 4, "graph": "g", "tensors": rows}))
    code, printed = run(tmp_path / "dump", "--write-names", tmp_path / "named")
    assert (code, printed) == (0, f"1 tensors of step 4 are in {tmp_path / 'named'}\n")
    code, printed = run(tmp_path / "dump", tmp_path / "named", "--only", "tensors", folder=tmp_path)
    assert code == 0 and printed.startswith("tensors: inside. All 1 tensors of step 4 are within tolerance")
    assert run(tmp_path / "dump")[0] == 2, "one folder is not enough"
