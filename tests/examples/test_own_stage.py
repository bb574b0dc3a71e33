"""A self-written stage works in all ways to train, and a new stage of this package is named in few places."""

from __future__ import annotations

import ast

import numpy as np
import pytest

from npu_bridge import stages
from tests.examples.commands import run_warm
from tests.loose_code import REPOSITORY, module_at


@pytest.fixture(scope="module")
def example():
    return module_at("examples/stages/own_stage.py")


def test_all_ways_to_train_do_what_numpy_does(example, capsys):
    results = example.main()
    printed = capsys.readouterr().out
    assert "transform" in printed and "NormalizeEach(norm=0.1)" in printed
    kernel = example.START.astype(np.float64)
    batches = list(zip(*(np.split(array.astype(np.float64), example.BATCHES) for array in example.data())))
    for first, second in zip(batches[::2], batches[1::2]):
        grads = [2 * x.T @ (x @ kernel - y) / len(x) for x, y in (first, second)]
        mean = sum(grads) / 2
        kernel = kernel - example.RATE * 0.1 * mean / np.linalg.norm(mean)
    assert sorted(results) == ["Keras", "graph", "loop"]
    for way, trained in results.items():
        np.testing.assert_allclose(trained, kernel, rtol=1e-4, atol=1e-5, err_msg=way)
    with pytest.raises(ValueError, match="above 0"):
        example.NormalizeEach(0.0)


def test_it_runs_as_a_script(warm_python):
    printed = run_warm(warm_python, "python examples/stages/own_stage.py")
    results = [line.partition(": ")[2] for line in printed.splitlines() if line.startswith(("graph", "Keras", "loop"))]
    assert len(results) == 3 and len(set(results)) == 1
    assert "AutoGraph" not in printed


def names_in(path):
    """Every name that the code of a file says, in texts too, but not in docstrings and messages."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Name):
            yield node.id
        elif isinstance(node, (ast.Attribute, ast.alias, ast.ClassDef)):
            yield node.attr if isinstance(node, ast.Attribute) else node.name
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield node.value


# The code that makes stages for users who do not name them, and the messages of a stage's schedule.
COMPOSERS = {
    "npu_bridge/boost/choice.py",
    "npu_bridge/gradients/stages/freeze_schedule.py",
    "npu_bridge/session/elastic/global_batches.py",
}


def test_every_stage_is_named_in_its_file_and_in_the_list_alone():
    files = [
        path
        for package in ("npu_bridge", "npu_run", "npu_device", "hccl", "tensorflow1_compat")
        for path in (REPOSITORY / package).rglob("*.py")
    ]
    said = {path.relative_to(REPOSITORY).as_posix(): set(names_in(path)) for path in files}
    public = [each for each in map(vars(stages).get, stages.__all__) if isinstance(each, type)]
    bases = stages.Stage.__module__
    public = [each.__name__ for each in public if issubclass(each, stages.Stage) and each.__module__ != bases]
    assert len(public) >= 7
    for name in public:
        home = getattr(stages, name).__module__.replace(".", "/") + ".py"
        assert home.startswith("npu_bridge/gradients/stages/")
        where = {path for path, names in said.items() if name in names} - COMPOSERS
        assert sorted(where) == [home, "npu_bridge/stages.py"]
