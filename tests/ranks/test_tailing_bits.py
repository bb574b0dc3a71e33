"""Tail optimisation changes no bit: every way to train, through overflows of every kind, and random steps."""

from __future__ import annotations

import dataclasses
import itertools

import numpy as np
import pytest
import tensorflow as tf
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from npu_bridge import collective
from npu_bridge.session.tailing_hook import tail_optimization_report_of
from tests.goldens.two_layers import OPTIMIZERS, assert_all_finite, in_graph
from tests.ranks.ways import WAYS, WIRES, control_flow, open_session
from tests.tailing.random_networks import CLIPS, NETWORKS, Network
from tests.tailing.waiting import nodes_of_run, superfluous_waits

tf1 = tf.compat.v1
STEPS = 50
# The values added to the gradients of a step: on some rank alone, or on all of them.
NOTHING, NAN, INFINITE, SUM_TOO_LARGE, TOO_LARGE_FOR_16_BITS = range(5)
# As it travels, every rank's gradient fits the wire, and their sum does not.
LARGE = {"none": 2e38, "float16": 4e4}

_ALL = itertools.product(WAYS, ("momentum", "adam", "lamb"), WIRES)
# The order of the stock wrappers is tried with one optimizer alone.
CASES = {"_".join(case).replace(" ", "_"): case for case in _ALL if case[0] != "scale inside" or case[1] == "adam"}


class Model:
    """An embedding, whose gradient is sparse, below two layers; what is added gets into both kinds of gradients."""

    def __init__(self, tokens, added):
        def variable(name, *shape):
            initializer = tf1.random_normal_initializer(stddev=0.4, seed=3)
            return tf1.get_variable(name, shape, initializer=initializer, use_resource=True)

        embedding, inner, outer = variable("embedding", 6, 4), variable("inner", 4, 4), variable("outer", 4, 2)
        embedded = tf.nn.embedding_lookup(embedding, tokens)
        values = tf.matmul(tf.tanh(tf.matmul(embedded, inner)), outer)
        self.variables = [embedding, inner, outer]
        self.loss = tf.reduce_mean(tf.square(values)) + added * (tf.reduce_sum(outer) + tf.reduce_sum(embedded[:1]))


def train_op_of(case, tokens, trouble, is_tailing):
    """Of one case: the training step, and its loss scale."""
    way, name, wire = CASES[case]
    with tf1.variable_scope(case):
        step = tf1.get_variable("step", [], tf.int64, tf1.zeros_initializer(), trainable=False, use_resource=True)
        optimizer, scale = WAYS[way](OPTIMIZERS[name](), wire, case, is_tailing)
        on_wire = 1.0 if way == "scale inside" else scale
        added = tf.gather(tf.stack([0.0, np.nan, np.inf, LARGE[wire] / on_wire, 1e5 / on_wire]), trouble)
        model = Model(tokens, added)
        return optimizer.minimize(model.loss, step, var_list=model.variables), tf.identity(scale)


@in_graph
def train_all(is_tailing, is_classic):
    """On a rank: trains every case in one session; gives variables, loss scales by step, and what the pass has done."""
    ranks = collective.current()
    here, everywhere = np.random.RandomState(ranks.rank), np.random.RandomState(7)
    tokens, trouble = tf1.placeholder(tf.int32, [4]), tf1.placeholder(tf.int32, [])
    with control_flow(is_classic):
        train_ops, scales = zip(*(train_op_of(case, tokens, trouble, is_tailing) for case in CASES))
        start = tf1.global_variables_initializer()
    variables, trace = {variable.name: variable for variable in tf1.global_variables()}, []
    with open_session(is_tailing) as session:
        session.run(start)
        for _ in range(STEPS):
            own = here.choice([NOTHING, NAN, INFINITE, TOO_LARGE_FOR_16_BITS], p=[0.81, 0.07, 0.07, 0.05])
            met = everywhere.choice([own, SUM_TOO_LARGE if ranks.size > 1 else own], p=[0.85, 0.15])
            session.run(train_ops, {tokens: here.randint(0, 6, 4), trouble: met})
            trace.append(session.run(scales))
        values = session.run(variables)
    report = tail_optimization_report_of(tf1.get_default_graph())
    return values, np.float32(trace), None if report is None else dataclasses.asdict(report)


@pytest.mark.slow("every way to train on one to three ranks; test_tailing_pass.py has some")
@pytest.mark.parametrize(("rank_count", "is_classic"), [(1, True), (2, True), (3, False)])
def test_no_variable_no_slot_and_no_loss_scale_differs(on_ranks, rank_count, is_classic):
    as_built, freed = (
        on_ranks(rank_count, train_all, is_tailing, is_classic, time_limit_secs=600) for is_tailing in (False, True)
    )
    expected, scales, _ = as_built[0]
    assert_all_finite(expected)
    for values, trace, _ in [*as_built, *freed]:
        differing = [name for name, value in expected.items() if values[name].tobytes() != value.tobytes()]
        assert differing == []
        assert trace.tobytes() == scales.tobytes()
    for case, scales_of_case in zip(CASES, scales.T):
        skipped = STEPS - expected[f"{case}/step:0"]
        assert 2 < skipped < 40, case
        assert 2 < np.sum(scales_of_case[1:] < scales_of_case[:-1]) <= skipped, case
    slots = [name for name in expected if name.endswith(("/Momentum:0", "/Adam:0", "/m:0"))]
    assert len(slots) == 3 * len(CASES)
    for report in (report for _, _, report in freed if rank_count > 1):
        # Otherwise the same bits would say nothing.
        assert report["kept"] == {} and len(report["freed"]) >= sum(way != "NPUOptimizer" for way, *_ in CASES.values())


# Random training steps, in which nothing waits that need not.
TRAINERS = st.fixed_dictionaries(
    {
        "way": st.sampled_from(sorted(WAYS)),
        "optimizer": st.sampled_from(["momentum", "adam", "adam", "lamb"]),
        "wire": st.sampled_from(WIRES),
        "clip": st.sampled_from(["none", "none", *CLIPS]),
    }
)


@in_graph
def train_randomly(layers, trainers, is_classic, is_tailing):
    """On a rank: four steps, of which one overflows on the last rank and one everywhere in the sum.

    Returns:
      All variables by name, the superfluous waits of the graph that was run, and what the pass says, None where it has
      not run.
    """
    ranks = collective.current()
    random = np.random.RandomState(ranks.rank)
    with control_flow(is_classic):
        network = Network(layers)
        trainable = tf1.trainable_variables()
        train_ops = [
            minimize(network.loss, trainable[number :: len(trainers)], f"trainer_{number}", trainer, is_tailing)
            for number, trainer in enumerate(trainers)
        ]
        start = tf1.global_variables_initializer()
    variables = {variable.name: variable for variable in tf1.global_variables()}
    options, metadata = tf1.RunOptions(output_partition_graphs=True), tf1.RunMetadata()
    with open_session(is_tailing) as session:
        session.run(start)
        for poison in (0.0, np.nan if ranks.rank == ranks.size - 1 else 0.0, 1.9e35, 0.0):
            session.run([train_ops, network.loss], network.feeds(random, poison), options, metadata)
        values = session.run(variables)
    report = tail_optimization_report_of(tf1.get_default_graph())
    loss = [network.loss.op.name]
    waits = superfluous_waits(nodes_of_run(metadata), loss)
    return values, waits, None if report is None else dataclasses.asdict(report)


def minimize(loss, variables, name, trainer, is_tailing):
    optimizer, _ = WAYS[trainer["way"]](OPTIMIZERS[trainer["optimizer"]](), trainer["wire"], name, is_tailing)
    gradients = optimizer.compute_gradients(loss, var_list=variables)
    there = [(grad, variable) for grad, variable in gradients if grad is not None]
    clipped = CLIPS[trainer["clip"]]([grad for grad, _ in there])
    step = tf1.get_variable(
        f"{name}/global_step", [], tf.int64, tf1.zeros_initializer(), trainable=False, use_resource=True
    )
    return optimizer.apply_gradients([(grad, variable) for grad, (_, variable) in zip(clipped, there)], step)


# A smaller example is not worth the minutes of finding it on ranks.
@pytest.mark.slow("fourteen random networks train twice")
@settings(
    max_examples=14,
    deadline=None,
    phases=[Phase.explicit, Phase.generate],
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(layers=NETWORKS, trainers=st.lists(TRAINERS, min_size=1, max_size=2), is_classic=st.booleans())
def test_same_bits_and_no_superfluous_wait(on_ranks, layers, trainers, is_classic):
    as_built, freed = (
        on_ranks(2, train_randomly, layers, trainers, is_classic, is_tailing, time_limit_secs=600)
        for is_tailing in (False, True)
    )
    for (values, _, _), (freed_values, waits, report) in zip(as_built, freed):
        assert {name for name, value in values.items() if value.tobytes() != freed_values[name].tobytes()} == set()
        if all(trainer["clip"] == "none" for trainer in trainers):
            assert waits == []
            # The pass has freed a part of the step.
            assert report["kept"] == {}
            assert report["freed"] or all(trainer["way"] == "NPUOptimizer" for trainer in trainers)
        elif waits:
            # The report says so, or it is the check of clipped gradients, which NPUOptimizer adds by itself.
            assert report["kept"] or report["unchanged_because"], waits
