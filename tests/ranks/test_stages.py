"""Stages on two ranks, in every way to train, against the same model in numpy as on one rank."""

from __future__ import annotations

import numpy as np
import pytest
import tensorflow as tf

from npu_bridge import collective, stages
from npu_bridge.estimator.npu.npu_loss_scale_manager import FixedLossScaleManager
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


DENSE = {
    "alone": lambda: [],
    "window": lambda: [stages.Accumulate(1)],
    "reduced_window": lambda: [stages.Accumulate(1, exchange="batch")],
    "frozen": lambda: [stages.Freeze({"groups": [["kernel"], ["table"]], "kind": "explicit", "sequence": [0]})],
}


def sent_as_a_whole():
    """On a rank: what `TopK` makes of gradients where sending all values is cheaper, by stages and loss scaling."""
    rank, found = collective.current().rank, {}
    kernel, table = tf.Variable(tf.zeros([4]), name="kernel"), tf.Variable(tf.zeros([4, 1]), name="table")
    for case, others in DENSE.items():
        for manager in (None, FixedLossScaleManager(8.0)):
            added = [stages.TopK(0.9, error_feedback=False), *others()]
            name = case if manager is None else f"{case}_scaled"
            pipeline = stages.pipeline(name, manager, is_distributed=True, stages=added)

            @tf.function(autograph=False)
            def combined(pipeline=pipeline):
                step = pipeline.begin()
                scale = pipeline.scale(tf.constant(1.0), step)
                rows = tf.IndexedSlices(tf.fill([1, 1], 3.0 * scale), tf.constant([rank]), tf.constant([4, 1]))
                pairs = pipeline.combine(step, [(tf.range(4.0) * (rank + 1.0) * scale, kernel), (rows, table)])
                pipeline.apply(step, lambda pairs: pairs[0][1].assign_add(tf.zeros_like(pairs[0][1])))
                return [tf.convert_to_tensor(grad) for grad, _ in pairs]

            found[name] = [grad.numpy().tolist() for grad in combined()]
    return found


@pytest.mark.ranks(3)
def test_gradients_that_are_sent_as_a_whole_are_the_mean_on_any_number_of_ranks(on_ranks):
    """Sums of three are multiplied by a quarter, and somebody has to do the rest of the mean."""
    for found in on_ranks(3, sent_as_a_whole):
        assert len(found) == 2 * len(DENSE)
        for name, (kernel, table) in found.items():
            np.testing.assert_allclose(kernel, np.arange(4.0) * 2.0, rtol=1e-6, err_msg=name)
            np.testing.assert_allclose(table, [[1.0], [1.0], [1.0], [0.0]], rtol=1e-6, err_msg=name)
