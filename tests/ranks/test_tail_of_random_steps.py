"""Random training steps, with and without tail optimisation: the same bits, and nothing waits that need not."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import tensorflow as tf
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from npu_bridge import collective
from npu_bridge.session.tailing_hook import tail_optimization_report_of
from tests.goldens.two_layers import OPTIMIZERS, in_graph
from tests.gradients.tailing.random_networks import CLIPS, NETWORKS, Network
from tests.gradients.tailing.waiting import nodes_of_run, superfluous_waits
from tests.ranks.ways import WAYS, WIRES, control_flow, open_session

tf1 = tf.compat.v1
pytestmark = pytest.mark.ranks(2)

TRAINERS = st.fixed_dictionaries(
    {
        "way": st.sampled_from(sorted(WAYS)),
        "optimizer": st.sampled_from(["momentum", "adam", "adam", "lamb"]),
        "wire": st.sampled_from(WIRES),
        "clip": st.sampled_from(["none", "none", *CLIPS]),
    }
)


@in_graph
def train(layers, trainers, is_classic, is_tailing):
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
        on_ranks(2, train, layers, trainers, is_classic, is_tailing, time_limit_secs=600)
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
