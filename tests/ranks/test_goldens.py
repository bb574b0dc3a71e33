"""Every golden on two and on four ranks, in its ways to train, against the same model in numpy as on one rank."""

from __future__ import annotations

import pytest

from tests.goldens import cases, checks


@pytest.mark.few_fast(["function"], "test_keras.py trains by `fit` on two ranks")
@pytest.mark.parametrize("way", cases.FUNCTIONS)
def test_training_of_two_is_that_of_the_model_in_numpy(on_ranks, way):
    plan = [pair for pair in cases.plan(2, False) if pair[0] == way]
    checks.assert_equals_numpy(on_ranks(2, checks.trained, plan))


@pytest.mark.slow("the same stages in other ways to train")
def test_training_of_two_in_other_ways_too(on_ranks):
    checks.assert_equals_numpy(on_ranks(2, checks.trained, cases.plan(2, True)))


@pytest.mark.slow("four ranks share two cores")
def test_training_of_four_is_that_of_the_model_in_numpy(on_ranks):
    checks.assert_equals_numpy(on_ranks(4, checks.trained, cases.plan(4, True)))
