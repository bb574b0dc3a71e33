"""The cases that `make test` runs of a small suite, and its report of times."""

from __future__ import annotations

import os
import re
import subprocess
import sys

import pytest

from tests.rank_pool import REPOSITORY

CONFTEST = """
import pathlib
from tests import tiers, times

times.MOST_SECS = 1


def pytest_configure(config):
    times.keep_times(config, pathlib.Path("out", "times.txt"))


def pytest_collection_modifyitems(items):
    tiers.mark_slow(items)
    tiers.mark_ranks(items)
"""
SUITE = """
import time
import pytest


def test_plain():
    pass


@pytest.mark.slow("long")
def test_slow():
    time.sleep(0.3)


@pytest.mark.few_fast(2, "the others are alike")
@pytest.mark.parametrize("number", [1, 2, 3])
def test_two(number):
    pass


@pytest.mark.few_fast(["b"], "the others are alike")
@pytest.mark.parametrize("letter", "abc")
def test_one(letter):
    pass


@pytest.mark.few_fast("each", "not every pair")
@pytest.mark.parametrize("number", [1, 2])
@pytest.mark.parametrize("letter", "abc")
def test_pairs(number, letter):
    pass
"""
FAST = ["test_plain", "test_two[1]", "test_two[2]", "test_one[b]"]
FAST += ["test_pairs[a-1]", "test_pairs[a-2]", "test_pairs[b-1]", "test_pairs[c-1]"]
# However long it took: a busy machine can be late.
TOO_LONG = r" took \d+\.\d s; a case of `make test` takes at most "


@pytest.fixture
def run(tmp_path):
    """Runs pytest on a suite in a folder of its own; gives its exit code and what it prints."""
    (tmp_path / "conftest.py").write_text(CONFTEST)

    def run(suite, *arguments):
        (tmp_path / "test_suite.py").write_text(suite)
        command = [sys.executable, "-m", "pytest", "-v", "-p", "no:xdist", *arguments]
        environment = {**os.environ, "PYTHONPATH": str(REPOSITORY)}
        done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=300)
        return done.returncode, done.stdout + done.stderr

    return run


def test_fast_cases_are_those_that_are_not_marked(run):
    code, printed = run(SUITE, "-m", "not slow")
    assert code == 0 and re.findall(r"test_suite\.py::(\S+) PASSED", printed) == FAST
    code, printed = run(SUITE)
    assert code == 0 and printed.count(" PASSED") == 14


def test_cases_on_ranks_can_be_left_out(run):
    fixtures = "".join(f"@pytest.fixture\ndef {name}:\n    pass\n" for name in ("rank_pools()", "on_ranks(rank_pools)"))
    suite = f"import pytest\n{fixtures}def test_on_ranks(on_ranks):\n    pass\ndef test_alone():\n    pass\n"
    assert re.findall(r"::(\S+) PASSED", run(suite, "-m", "not ranks")[1]) == ["test_alone"]


@pytest.mark.few_fast(2, "other mistakes are reported alike")
@pytest.mark.parametrize("mark", ["slow", "slow()", "slow('')", "few_fast(2)", "few_fast('all', 'why')"])
def test_a_mark_says_why(run, mark):
    code, printed = run(f"import pytest\n\n@pytest.mark.{mark}\ndef test_it():\n    pass\n")
    assert code == pytest.ExitCode.USAGE_ERROR and "test_suite.py::test_it: the mark `" in printed


def test_a_long_case_fails_the_fast_tier_alone(run, tmp_path):
    long = SUITE.replace('@pytest.mark.slow("long")\n', "").replace("time.sleep(0.3)", "time.sleep(1.2)")
    code, printed = run(long, "-m", "not slow")
    assert code == 1 and re.search(rf"^test_suite\.py::test_slow{TOO_LONG}", printed, re.M)
    assert "test_slow took" in (tmp_path / "out" / "times.txt").read_text()
    code, printed = run(long)
    assert code == 0 and not re.search(TOO_LONG, printed)


def test_a_slow_machine_is_not_taken_for_slow_cases(run):
    cases = "".join(f"def test_{number}():\n    time.sleep(0.3)\n\n\n" for number in range(5))
    suite = f"import time\nfrom tests import times\n\ntimes.MOST_SECS, times._MOST_OF_ALL = 0.2, 0.5\n\n\n{cases}"
    code, printed = run(suite, "-m", "not slow")
    assert code == 0 and not re.search(TOO_LONG, printed)


def test_cases_that_ci_names_exist():
    named = re.findall(r"(tests/\S+?\.py)::(\w+)", (REPOSITORY / ".ci" / "run").read_text())
    assert named and [f"def {case}(" in (REPOSITORY / file).read_text() for file, case in named] == [True] * len(named)


def test_minutes_of_folders_and_the_slowest_cases_are_kept(run, tmp_path):
    code, printed = run(SUITE)
    table = (tmp_path / "out" / "times.txt").read_text()
    for text in (printed, table):
        assert re.search(r"^ +0\.\d\d min +14 cases  in 0\.\d minutes$", text, re.M), text
        assert re.search(r"^ +\d+\.\d\d s  test_suite\.py::test_slow$", text, re.M), text
    assert code == 0
