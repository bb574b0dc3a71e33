"""Several losses with a loss scale each on two ranks, with overflows of one loss on one rank."""

from __future__ import annotations

import pytest

from tests import several_losses

pytestmark = pytest.mark.ranks(2)


def test_an_overflow_of_one_loss_on_one_rank_moves_that_scale_on_all(on_ranks):
    results = on_ranks(2, several_losses.trained, tuple(several_losses.WAYS))
    for way in several_losses.WAYS:
        several_losses.assert_equals_numpy([result[way] for result in results])
