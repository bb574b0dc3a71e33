"""Frozen layers on real ranks: training is that of the model in numpy, and nothing of them is computed or sent."""

from __future__ import annotations

import pytest
import tensorflow as tf

from npu_bridge import collective, stages
from npu_bridge.collective.agreement import RanksDisagreeError
from npu_bridge.estimator.npu.npu_optimizer import NPUOptimizer
from tests import freeze_cases, freeze_models
from tests.training import assert_same_bits, in_graph

tf1 = tf.compat.v1


def trained_in(plan):
    """On a rank: what `freeze_cases.trained` gives."""
    return {(way, chain): freeze_cases.trained(way, chain) for way, chain in plan}


def compare(results):
    for way, chain in results[0]:
        freeze_cases.assert_equals_numpy(way, chain, [result[way, chain] for result in results])


@pytest.mark.slow("every schedule; tests/gradients has them on one rank")
@pytest.mark.ranks(2)
def test_training_is_that_of_the_model_in_numpy(on_ranks):
    ways = [("graph", "all"), ("graph, tailed", "clipped"), ("function", "clipped")]
    compare(on_ranks(2, trained_in, [*ways, ("fit, legacy", "alone"), ("fit, current", "alone")]))


@pytest.mark.slow("four ranks share two cores")
@pytest.mark.ranks(4)
def test_four_ranks_freeze_the_same_layers(on_ranks):
    compare(on_ranks(4, trained_in, [("graph", "all")]))


@pytest.mark.ranks(2)
def test_sessions_run_no_operator_of_a_frozen_layer_and_send_nothing_of_it(on_ranks):
    freeze_cases.assert_frozen_layers_cost_nothing(on_ranks(2, freeze_cases.executed, "alone"))


@pytest.mark.slow("two trainings; tests/gradients has them on one rank")
@pytest.mark.ranks(2)
def test_each_rank_resumes_in_the_middle_of_a_window(on_ranks, tmp_path):
    for whole, resumed in on_ranks(2, freeze_cases.resumed, "graph", str(tmp_path)):
        assert_same_bits(resumed, whole)


@in_graph
def refusal_of(settings_of_rank_1):
    """On a rank: what the first step says when rank 1 has another schedule."""
    settings = settings_of_rank_1 if collective.current().rank == 1 else {}
    schedule = stages.FreezeSchedule(**{"groups": freeze_models.GROUPS, "total_steps": 100, **settings})
    variables = [tf1.get_variable(name, initializer=value) for name, value in freeze_models.start_values().items()]
    loss = tf.add_n([tf.reduce_sum(tf.square(variable)) for variable in variables])
    inner = tf1.train.GradientDescentOptimizer(0.1)
    try:
        NPUOptimizer(inner, is_distributed=True, stages=[stages.Freeze(schedule)]).compute_gradients(loss)
    except RanksDisagreeError as error:
        return str(error)


@pytest.mark.ranks(2)
def test_ranks_with_other_schedules_are_told_before_the_first_step(on_ranks):
    for settings in ({"seed": 5}, {"full_share": 0.5}, {"kind": "continuous"}, {"groups": freeze_models.GROUPS[:2]}):
        sentences = list(filter(None, on_ranks(2, refusal_of, settings)))
        assert sentences, settings
        for sentence in sentences:
            assert "rank 1 and rank 0 were set up differently" in sentence
            assert "Expected Freeze=" in sentence and sentence.endswith("the same settings."), sentence
    assert on_ranks(2, refusal_of, {}) == [None, None]
