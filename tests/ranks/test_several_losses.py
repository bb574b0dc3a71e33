"""Several losses, groups and batches with a loss scale each on two ranks, with overflows on one of them."""

from __future__ import annotations

import pytest

from tests import accumulation_forms, group_cases, several_losses

pytestmark = pytest.mark.ranks(2)


@pytest.mark.slow("every way to train; that of one group is fast")
def test_an_overflow_of_one_loss_on_one_rank_moves_that_scale_on_all(on_ranks):
    results = on_ranks(2, several_losses.trained, tuple(several_losses.WAYS))
    for way in several_losses.WAYS:
        several_losses.assert_equals_numpy([result[way] for result in results])


@pytest.mark.slow("every stage with several losses")
def test_losses_train_as_their_sum_does_with_every_stage_that_keeps_ranks_together(on_ranks):
    several_losses.assert_like_one_loss(on_ranks(2, several_losses.trained_with_stages))


@pytest.mark.slow("every form; tests/gradients has them on one rank")
def test_accumulation_in_its_other_forms_does_what_numpy_does(on_ranks):
    results = on_ranks(2, accumulation_forms.trained, tuple(accumulation_forms.WAYS))
    for way, form in results[0]:
        accumulation_forms.assert_equals_numpy(form, [result[way, form] for result in results])


@pytest.mark.slow("tests/amp has groups on one rank")
def test_an_overflow_in_one_group_on_one_rank_moves_that_scale_on_all(on_ranks):
    results = on_ranks(2, group_cases.trained, tuple(group_cases.WAYS))
    for way in group_cases.WAYS:
        group_cases.assert_equals_model([result[way] for result in results])
