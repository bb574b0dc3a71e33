"""Every pair of stages and chains drawn at random, on two ranks, against the model of the documented order."""

from __future__ import annotations

import numpy as np
import pytest

from tests import stage_chains
from tests.stage_cases import assert_close
from tests.stage_models import in_numpy

TOGETHER = 12  # chains in a graph


def trained_in_groups(cases):
    """On a rank: by the number of each case what `stage_chains.trained_together` gives."""
    results = {}
    for start in range(0, len(cases), TOGETHER):
        numbered = dict(enumerate(cases[start : start + TOGETHER], start))
        results.update(stage_chains.trained_together(numbered))
    return results


@pytest.mark.slow("all chains of stages; single stages are fast")
@pytest.mark.ranks(2)
def test_every_chain_does_what_numpy_does_or_is_refused_by_name(on_ranks):
    cases = stage_chains.cases(accepted=100)
    of_ranks = on_ranks(2, trained_in_groups, cases)
    skipped = 0
    for number, case in enumerate(cases):
        results, where = [of_rank[number] for of_rank in of_ranks], f"chain {number}: {case}"
        if case.refused():
            for text in results:
                assert isinstance(text, str), f"{where} was accepted"
                assert all(name in text for name in case.refused()), f"{where}: {text}"
                order = ("scale, freeze, accumulate, local clip, reduce, verdict", "freeze, reduce, verdict, update")
                assert any(part in text for part in order), f"{where}: {text}"
            continue
        assert not isinstance(results[0], str), f"{where}: {results[0]}"
        model = in_numpy(case.chain, 2, [case.fed(rank) for rank in range(2)], case.momentum)
        skipped += sum(later < scale for scale, later in zip(model.scales, model.scales[1:]))
        for rank, result in enumerate(results):
            assert result.scales == model.scales, where
            assert result.updates == model.updates, where
            for what in ("values", "slots", "residuals", "sums"):
                assert_close(getattr(result, what), getattr(model, what)[rank], f"{where}, rank {rank}, {what}")
            for name in model.alike:
                assert np.array_equal(result.values[name], results[0].values[name]), f"{where}: {name} differs"
    assert skipped > 200
