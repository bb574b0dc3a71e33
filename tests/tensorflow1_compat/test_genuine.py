"""Our parts of TensorFlow 1.15 do the same as the genuine ones: values, gradients, shapes, names, errors.

`genuine/run.py` is a script of TensorFlow 1.15 with a case for each name. `genuine/tensorflow_1_15.npz` holds what it
gave there; here it runs under `npu-run`. After a change of a case, with the folder of `make venv-tf115`:

    cd tests/tensorflow1_compat/genuine && ../../../.venv-tf115/bin/python run.py tensorflow_1_15.npz
"""

from __future__ import annotations

import importlib.util
import os
import pathlib
import subprocess
import sys

import pytest

from tests.tensorflow1_compat.genuine.compare import differences, signature_problem
from tests.tensorflow1_compat.genuine.known import DIFFERENT, DIFFERENT_SIGNATURES, NOT_COVERED
from tests.tensorflow1_compat.genuine.results import read

pytestmark = pytest.mark.slow("a thousand names, which run for half a minute; test_contrib_conformance.py has some")
REPOSITORY = pathlib.Path(__file__).resolve().parents[2]
GENUINE = pathlib.Path(__file__).parent / "genuine"
PYTHON_OF_1_15 = REPOSITORY / ".venv-tf115/bin/python"
ANSWERS = read(GENUINE / "tensorflow_1_15.npz")


def run(path, *command, **environment):
    done = subprocess.run(
        [*command, "run.py", str(path)], cwd=GENUINE, capture_output=True, text=True, check=False,
        env={**os.environ, "TF_CPP_MIN_LOG_LEVEL": "3", **environment},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    return read(path)


@pytest.fixture(scope="module")
def here(tmp_path_factory):
    path = tmp_path_factory.mktemp("here") / "here.npz"
    return run(path, sys.executable, "-m", "npu_bridge.run", "--tf1", PYTHONPATH=str(REPOSITORY))


def test_all_cases_run(here):
    assert list(here["cases"]) == list(ANSWERS["cases"])
    failed = [key for key, case in ANSWERS["cases"].items() if "error" in case and not key.rstrip("+").endswith("!")]
    assert not failed, "cases that the genuine one cannot run"


BY_ADDONS = {"image.dense_image_warp", "image.interpolate_spline", "image.sparse_image_warp"}


@pytest.mark.parametrize("key", ANSWERS["cases"])
def test_genuine(key, here):
    if key in BY_ADDONS and importlib.util.find_spec("tensorflow_addons") is None:
        pytest.skip("computed by tensorflow-addons, which ends at TensorFlow 2.15")
    found = differences(ANSWERS["cases"][key], here["cases"][key])
    if key in DIFFERENT:
        assert found, f"this is known to differ: {DIFFERENT[key]}"
    else:
        assert not found, "\n".join(found)


def common_names(here):
    return [
        (module, name) for module, names in ANSWERS["names"].items() for name in names if name in here["names"][module]
    ]


def test_every_name_has_a_case(here):
    covered = {name for key in ANSWERS["cases"] for name in key.split(":")[0].rstrip("!+ ").split()}
    told = {f"{module}.{name}" for (module, names) in NOT_COVERED for name in names.split()}
    names = {f"{module}.{name}" for module, name in common_names(here) if name not in NOT_OF_1_15}
    assert sorted(names - covered - told) == []
    assert sorted(told & covered) == [], "these have a case by now"


NOT_OF_1_15 = ("absolute_import", "division", "print_function")  # what old modules imported from __future__


@pytest.mark.parametrize("module", ANSWERS["names"])
def test_signatures(module, here):
    problems = {}
    for name, genuine in ANSWERS["names"][module].items():
        problem = name in here["names"][module] and signature_problem(genuine, here["names"][module][name])
        if problem:
            problems[f"{module}.{name}"] = problem
    known = {name for name in DIFFERENT_SIGNATURES if name.startswith(f"{module}.")}
    assert {name: problem for name, problem in problems.items() if name not in known} == {}
    assert known <= set(problems), "these have the signature of 1.15 by now"


@pytest.mark.skipif(not PYTHON_OF_1_15.exists(), reason="no TensorFlow 1.15; `make venv-tf115` needs Python 3.7")
def test_the_answers_are_those_of_the_genuine_one(tmp_path):
    # TensorFlow 2 sets the variable in this process, and 1.15 would then have variables of another kind.
    again = run(tmp_path / "again.npz", str(PYTHON_OF_1_15), TF2_BEHAVIOR="0")
    assert again["names"] == ANSWERS["names"]
    for key, case in ANSWERS["cases"].items():
        assert differences(case, again["cases"][key]) == [], key
