"""Frozen layers on real ranks: nothing of them is computed or sent, and schedules must agree."""

from __future__ import annotations

import re

import numpy as np
import tensorflow as tf

from npu_bridge import collective, stages
from npu_bridge.estimator.npu.npu_optimizer import NPUOptimizer
from tests.goldens.cases import GOLDENS, TABLES
from tests.goldens.models import in_numpy
from tests.goldens.problems import LAYERS, WIDTH, Layers
from tests.goldens.two_layers import in_graph
from tests.goldens.ways import InGraph
from tests.ranks.ways import tells_disagreement
from tests.transfers import is_transfer

tf1 = tf.compat.v1
GROUPS = TABLES["freeze layers"]["schedule"]["groups"]


def values_sent(graph, name, stats):
    """How many values of gradients an operator that has run has all-reduced."""
    try:
        op = graph.get_operation_by_name(name)
    except KeyError:  # made by TensorFlow from several
        return 0
    if not (is_transfer(op.type) and "fragment" in name):
        return 0
    shapes = [[dim.size for dim in output.tensor_description.shape.dim] for output in stats.output]
    return sum(int(np.prod(shape)) for shape in shapes)


def executed():
    """For each update: what was frozen, computed, how many gradient values were sent, every variable after it."""
    golden = GOLDENS["frozen"]
    training, after = InGraph(golden), in_numpy(golden, collective.current().size).trace
    options = tf1.RunOptions(trace_level=tf1.RunOptions.FULL_TRACE)
    found = []
    for grads in golden.problem.fed_to(collective.current().rank, 6):
        metadata = tf1.RunMetadata()
        training.session.run(training.train_op, training.feed(grads), options, metadata)
        ran = {stats.node_name: stats for device in metadata.step_stats.dev_stats for stats in device.node_stats}
        sent = sum(values_sent(training.graph, name, stats) for name, stats in ran.items())
        found.append((after[len(found)].frozen, sorted(ran), sent, training.everything()))
    return found


def assert_frozen_layers_cost_nothing(results):
    """Results of `executed`, by rank."""
    for rank, of_rank in enumerate(results):
        before = None
        assert {len(frozen) for frozen, *_ in of_rank} == {0, 2, 4}
        for frozen, names, sent, values in of_rank:
            backward = [name for name in names if name.startswith("gradients/")]
            for layer in range(LAYERS):
                of_layer = [name for name in backward if f"/layer_{layer}/" in name]
                updates = [name for name in names if re.search(rf"layer_{layer}/.*ApplyMomentum(_\d+)?$", name)]
                is_frozen = f"layer_{layer}/kernel" in frozen
                assert bool(of_layer) != is_frozen, (rank, frozen, layer, of_layer)
                assert len(updates) == (0 if is_frozen else 2), (rank, frozen, layer, updates)
                of_values = [name for name in values if name.startswith(f"layer_{layer}/")]
                assert len(of_values) == 4  # two variables and their slots
                is_same = before and all(values[name].tobytes() == before[name].tobytes() for name in of_values)
                assert before is None or is_same == is_frozen, (rank, frozen, layer)
            of_layer = WIDTH * WIDTH + WIDTH
            assert sent == (0 if len(results) == 1 else (LAYERS - len(frozen) // 2) * of_layer), (rank, frozen)
            before = values


def test_sessions_run_no_operator_of_a_frozen_layer_and_send_nothing_of_it(on_ranks):
    assert_frozen_layers_cost_nothing(on_ranks(2, executed))


@tells_disagreement
@in_graph
def refusal_of(settings_of_rank_1):
    """On a rank: what the first step says when rank 1 has another schedule."""
    settings = settings_of_rank_1 if collective.current().rank == 1 else {}
    schedule = stages.FreezeSchedule(**{"groups": GROUPS, "total_steps": 100, **settings})
    variables = [tf1.get_variable(name, initializer=value) for name, value in Layers().start_values().items()]
    loss = tf.add_n([tf.reduce_sum(tf.square(variable)) for variable in variables])
    inner = tf1.train.GradientDescentOptimizer(0.1)
    NPUOptimizer(inner, is_distributed=True, stages=[stages.Freeze(schedule)]).compute_gradients(loss)


def test_ranks_with_other_schedules_are_told_before_the_first_step(on_ranks):
    for settings in ({"seed": 5}, {"groups": GROUPS[:2]}):
        sentences = list(filter(None, on_ranks(2, refusal_of, settings)))
        assert sentences, settings
        for sentence in sentences:
            assert "rank 1 and rank 0 were set up differently" in sentence
            assert "Expected Freeze=" in sentence and sentence.endswith("the same settings."), sentence
    assert on_ranks(2, refusal_of, {}) == [None, None]
