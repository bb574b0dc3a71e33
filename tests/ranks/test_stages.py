"""Stages on two ranks, in every way to train, against the same model in numpy as on one rank."""

from __future__ import annotations

import pytest

from npu_bridge import collective
from tests import stage_cases
from tests.training import assert_same_bits

pytestmark = pytest.mark.ranks(2)


def trained_in(ways):
    """On a rank: what `stage_cases.trained` gives for every chain of these ways."""
    return {(way, chain): stage_cases.trained(way, chain) for way in ways for chain in stage_cases.CHAINS_OF_WAYS[way]}


@pytest.mark.parametrize("ways", [("graph", "graph, tailed"), ("function", "fit, legacy", "fit, current")])
def test_every_stage_does_what_numpy_does(on_ranks, ways):
    results = on_ranks(2, trained_in, ways)
    for way, chain in results[0]:
        stage_cases.assert_equals_numpy(way, chain, [result[way, chain] for result in results])


def sparsified_in(chains_of_ways):
    """On a rank: what `stage_cases.trained` gives."""
    return {(way, chain): stage_cases.trained(way, chain) for way, chains in chains_of_ways for chain in chains}


def test_sparsification_keeps_what_it_does_not_send(on_ranks):
    chains = stage_cases.SPARSE_CHAINS
    plan = [("graph", chains), ("graph, tailed", chains[-1:]), ("function", chains[-1:]), ("fit, current", chains[-1:])]
    results = on_ranks(2, sparsified_in, plan)
    for way, chain in results[0]:
        stage_cases.assert_equals_numpy(way, chain, [result[way, chain] for result in results])


def resumed_in(ways, folder):
    """On a rank: every variable after training in one go and after a restart, and before the restart."""
    assert collective.current().size == 2
    return [stage_cases.resumed(way, folder) for way in ways]


def test_each_rank_resumes_its_own_window_bit_for_bit(on_ranks, tmp_path):
    """Sums are each rank's own, and nothing that makes ranks alike before the first step touches them."""
    results = on_ranks(2, resumed_in, ("graph", "function"), str(tmp_path))
    for way in range(2):
        for whole, resumed, before in (result[way] for result in results):
            assert_same_bits(resumed, whole)
            assert any("accumulated" in name and value.any() for name, value in before.items())
        first, second = (result[way][2] for result in results)
        assert any("accumulated" in name and (first[name] != second[name]).any() for name in first)
