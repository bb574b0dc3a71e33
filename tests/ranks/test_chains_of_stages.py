"""Chains in which every two stages meet, on two ranks, against the model of the documented order."""

from __future__ import annotations

import numpy as np
import pytest

from tests.goldens import chains
from tests.goldens.checks import assert_close
from tests.goldens.models import in_numpy

TOGETHER = 12  # chains in a graph


def trained_in_groups(count):
    """On a rank: by the number of each case what `chains.trained_together` gives."""
    results = {}
    for start in range(0, count, TOGETHER):
        results.update(chains.trained_together(range(start, min(start + TOGETHER, count))))
    return results


@pytest.mark.slow("all pairs of stages; single stages are fast")
def test_every_chain_does_what_numpy_does_or_is_refused_by_name(on_ranks):
    cases = chains.cases()
    of_ranks = on_ranks(2, trained_in_groups, len(cases))
    skipped = 0
    for number, case in enumerate(cases):
        results, where = [of_rank[number] for of_rank in of_ranks], f"chain {number}: {case}"
        if case.refused():
            for text in results:
                assert isinstance(text, str), f"{where} was accepted"
                assert all(name in text for name in case.refused()), f"{where}: {text}"
                expected = ("scale, freeze, accumulate, local clip, reduce, verdict", "only one of these two stages")
                assert any(part in text for part in expected), f"{where}: {text}"
            continue
        assert not isinstance(results[0], str), f"{where}: {results[0]}"
        model = in_numpy(case.golden, 2)
        scales, last = [after.scales[0] for after in model.trace], model.trace[-1]
        skipped += sum(later < scale for scale, later in zip(scales, scales[1:]))
        for rank, result in enumerate(results):
            assert result.scales == scales, where
            assert result.updates == last.updates, where
            assert_close(result.values, last.values[rank], f"{where}, rank {rank}")
            for what in ("slots", "residuals", "sums"):
                assert_close(getattr(result, what), getattr(model, what)[rank], f"{where}, rank {rank}, {what}")
            for name in last.alike:
                assert np.array_equal(result.values[name], results[0].values[name]), f"{where}: {name} differs"
    assert skipped > len(cases)
