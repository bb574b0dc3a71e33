"""Every golden on one rank, in its ways to train, against the model in numpy, and checkpoints of some of them."""

from __future__ import annotations

import pytest

from tests.goldens import cases, checks, models
from tests.goldens.two_layers import assert_same_bits

SLOW = pytest.mark.slow("the same stages in other ways to train")
PLAN = [*cases.plan(1, False), *(pytest.param(*pair, marks=SLOW) for pair in cases.plan(1, True))]


@pytest.mark.parametrize("way, name", PLAN)
def test_training_is_that_of_the_model_in_numpy(way, name):
    checks.assert_equals_numpy([checks.trained([(way, name)])])


def test_the_forms_of_accumulation_differ():
    ends = [models.in_numpy(cases.GOLDENS[form], 1).trace[-1] for form in ("boost", "boost, sums", "apex")]
    assert len({str((end.updates, end.values[0]["kernel"])) for end in ends}) == 3


def test_every_part_of_the_schedule_is_frozen():
    trace = models.in_numpy(cases.GOLDENS["frozen, in windows"], 1).trace
    assert {len(after.frozen) for after in trace} == {0, 2, 4} and trace[-1].updates > 15


KEEPING = "accumulate + clip by norm + top k"
RESUMED = [("graph", name) for name in (KEEPING, "boost", "boost, sums", "apex", "frozen, in windows")]
IN_OTHER_WAYS = [("function", KEEPING), ("function", "frozen, in windows"), ("fit, current", KEEPING)]


@pytest.mark.few_fast(["graph-accumulate + clip by norm + top k"], "one case saves every kind of state")
@pytest.mark.parametrize("way, name", [*RESUMED, *(pytest.param(*pair, marks=SLOW) for pair in IN_OTHER_WAYS)])
def test_training_resumes_in_the_middle_of_a_window(way, name, tmp_path):
    """After a batch that was left out, too."""
    whole, resumed, left = checks.resumed(way, name, tmp_path)
    assert way.startswith("fit") or any("accumulated" in key and value.any() for key, value in left.items())
    assert_same_bits(resumed, whole)
