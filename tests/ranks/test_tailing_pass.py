"""The pass that frees the tail, on graphs of Horovod and stock loss scaling: fewer waits, or none changed and why."""

from __future__ import annotations

import functools
import json

import numpy as np
import pytest
import tensorflow as tf

from npu_bridge import collective
from npu_bridge.estimator.npu.npu_loss_scale_manager import FixedLossScaleManager
from npu_bridge.estimator.npu.npu_optimizer import NPUOptimizer
from npu_bridge.session.tailing_hook import TailOptimizationHook, tail_optimization_report_of
from npu_bridge.tailing import optimize_tail
from npu_bridge.tailing.report import NO_GRADIENTS
from tests.goldens.two_layers import OPTIMIZERS, assert_same_bits, in_graph
from tests.rank_pool import on_each_rank
from tests.ranks.ways import WAYS, control_flow, horovod, open_session, settings, started_session
from tests.tailing.waiting import computed_from, is_update, nodes_of_run, waiting_for
from tests.transfers import is_transfer

tf1 = tf.compat.v1
pytestmark = pytest.mark.horovod("the pass rewrites graphs of its optimizer")


def scaled(optimizer, way="scale outside"):
    """Puts Horovod's optimizer and stock loss scaling around an optimizer, in one order or the other."""
    return WAYS[way](optimizer, "none", way.replace(" ", "_"), False)[0]


class Chain:
    """A chain of small layers; the last layer's gradient is ready first, the first one's last."""

    def __init__(self, layers=4, width=8):
        self.inputs = tf1.placeholder(tf.float32, [None, width])
        self.poison = tf1.placeholder(tf.float32, [])
        values = self.inputs
        for number in range(layers):
            kernel = tf1.get_variable(
                f"layer_{number}",
                [width, width],
                initializer=tf1.random_normal_initializer(stddev=0.4, seed=number),
                use_resource=True,
            )
            values = tf.tanh(tf.matmul(values, kernel))
        self.loss = tf.reduce_mean(tf.square(values)) + self.poison * tf.reduce_sum(kernel)


def build(wrapper, is_freed):
    """The model, its training step, and the report of the pass if it ran."""
    model = Chain()
    optimizer = scaled(OPTIMIZERS["adam"](), wrapper)
    train_op = optimizer.minimize(model.loss, tf1.train.get_or_create_global_step())
    report = optimize_tail(tf1.get_default_graph(), collective.current()) if is_freed else None
    return model, train_op, report


@in_graph
def steps_by(gradients, is_freed):
    """On a rank: descends by given gradients of the ranks; the variable after each step."""
    variable = tf1.get_variable("variable", [2], initializer=tf1.zeros_initializer(), use_resource=True)
    own = tf1.placeholder(tf.float32, [2])
    optimizer = scaled(tf1.train.GradientDescentOptimizer(2.0**-100))
    train_op = optimizer.minimize(tf.reduce_sum(variable * own))
    if is_freed:
        assert optimize_tail(tf1.get_default_graph(), collective.current()).has_changed
    trace = []
    with started_session() as session:
        for step in gradients:
            session.run(train_op, {own: np.float32([step[collective.current().rank]] * 2)})
            trace.append(float(session.run(variable)[0]))
    return trace


def test_near_overflow_the_check_that_was_there_decides(on_ranks):
    # scaled by 1024 and less: far below, a finite sum near the end of float32, a sum beyond it, one rank beyond it
    gradients = [(1.0, 1.0), (1e35, 1e35), (3e35, 3e35), (1e38, 0.0), (1e34, 1e34), (2e35, -2e35)]
    as_built, freed = (on_ranks(2, steps_by, gradients, is_freed) for is_freed in (False, True))
    assert freed == as_built
    trace = as_built[0]
    assert trace[1] != trace[0], "a finite sum was refused"
    assert trace[2] == trace[1] and trace[3] == trace[2], "an overflow was applied"
    assert trace[4] != trace[3]


@in_graph
def train_every_other_run(is_tailing):
    """On a rank: gradients are checked inside a condition.

    Returns:
      The variables, how often an operator without inputs ran beside the updates, and the decisions that were freed.
    """
    ran = []
    with control_flow(is_classic=True), tf1.Session() as session:
        model, is_turn = Chain(), tf1.placeholder(tf.bool, [])
        optimizer = horovod(OPTIMIZERS["adam"](), "none", "every_other")
        gradients = optimizer.compute_gradients(model.loss)
        is_finite = [tf.reduce_all(tf.math.is_finite(grad)) for grad, _ in gradients]

        def apply():
            return tf.group(optimizer.apply_gradients(gradients), tf1.py_func(lambda: ran.append(True), [], []))

        train_op = tf.cond(is_turn, lambda: tf.cond(tf.reduce_all(is_finite), apply, tf.no_op), tf.no_op)
        report = optimize_tail(tf1.get_default_graph(), collective.current()) if is_tailing else None
        session.run(tf1.global_variables_initializer())
        for number in range(10):
            poison = np.nan if number in (4, 5) and collective.current().rank == 1 else 0.0
            feeds = {model.inputs: np.full([2, 8], number / 10), model.poison: poison, is_turn: number % 2 == 1}
            session.run(train_op, feeds)
        values = session.run({variable.name: variable for variable in tf1.global_variables()})
    return values, len(ran), report and list(report.freed)


def test_a_decision_inside_a_condition_comes_only_when_that_holds(on_ranks):
    as_built, freed = (on_ranks(2, train_every_other_run, is_tailing) for is_tailing in (False, True))
    for (values, times, _), (freed_values, freed_times, decisions) in zip(as_built, freed):
        assert_same_bits(freed_values, values)
        assert len(decisions) == 1
        assert freed_times == times == 4  # of five turns, one of which overflows


@in_graph
def updates_that_wait(wrapper, is_freed):
    """On a rank: of the executed graph, updates that wait for the gradient that is ready last, and those made of it."""
    with tf1.Session() as session:
        model, train_op, _ = build(wrapper, is_freed)
        session.run(tf1.global_variables_initializer())
        options, metadata = tf1.RunOptions(output_partition_graphs=True), tf1.RunMetadata()
        feeds = {model.inputs: np.ones([4, 8]), model.poison: 0.0}
        session.run(train_op, feeds, options=options, run_metadata=metadata)
    nodes = nodes_of_run(metadata)
    transfers = [node for node in nodes.values() if is_transfer(node.kind) and "decision" not in node.name]
    transfers = [node.name for node in transfers if "tail_optimization" not in node.name]
    last = transfers_of_first_layer(nodes, transfers)
    updates = {node.name for node in nodes.values() if is_update(node) and "layer" in " ".join(node.data)}
    return sorted(updates & waiting_for(nodes, last)), sorted(updates & computed_from(nodes, last)), sorted(updates)


def transfers_of_first_layer(nodes, transfers):
    """The transfers that an update of layer_0 is made of, and no update of another layer."""
    found = []
    for name in transfers:
        updated = [nodes[update] for update in computed_from(nodes, [name]) if is_update(nodes[update])]
        layers = {part for node in updated for part in " ".join([node.name, *node.data]).replace("/", " ").split()}
        if "layer_0" in str(layers) and "layer_2" not in str(layers):
            found.append(name)
    return found


@pytest.mark.parametrize("wrapper", ["scale outside", "scale inside"])
def test_updates_wait_for_their_own_gradient_alone(on_ranks, wrapper):
    for waiting, made_of_it, updates in on_ranks(2, updates_that_wait, wrapper, False):
        assert made_of_it and len(waiting) == len(updates) > len(made_of_it)  # as built, all of them wait
    for waiting, made_of_it, _ in on_ranks(2, updates_that_wait, wrapper, True):
        assert waiting == made_of_it


def clipped(model):
    optimizer = scaled(OPTIMIZERS["adam"]())
    gradients, variables = zip(*optimizer.compute_gradients(model.loss))
    gradients, _ = tf.clip_by_global_norm(gradients, 1.0)
    optimizer.apply_gradients(zip(gradients, variables))


def without_loss_scale(model):
    horovod(OPTIMIZERS["adam"](), "none", "plain").minimize(model.loss)


def not_distributed(model):
    OPTIMIZERS["adam"]().minimize(model.loss)


def sent_by(send):
    """Makes a training step of a function that sends one gradient."""

    def build_step(model):
        (kernel, *_) = tf1.trainable_variables()
        reduced = send(tf.gradients(model.loss, [kernel])[0])
        apply = functools.partial(tf1.train.GradientDescentOptimizer(0.1).apply_gradients, [(reduced, kernel)])
        tf.cond(tf.reduce_all(tf.math.is_finite(reduced)), apply, tf.no_op)

    return build_step


def send(grad):
    import horovod.tensorflow as hvd

    return hvd.allreduce(grad, name="sent")


def in_loop(grad):
    return tf.while_loop(lambda turn, _: turn < 2, lambda turn, value: (turn + 1, send(value)), (0, grad))[1]


def in_condition_with_more(grad):
    return tf.cond(tf.reduce_all(grad < 1.0), lambda: send(grad) * 2.0, lambda: grad)


def applied_in_function(model):
    optimizer = scaled(OPTIMIZERS["adam"]())
    gradients = optimizer.compute_gradients(model.loss)
    tf.cond(model.poison < 1.0, lambda: optimizer.apply_gradients(gradients), tf.no_op)


# The code that builds a step, whether with control flow of TF 1, and the message about it.
NOT_FREED = {
    "clipped": (clipped, False, "is known only when the last gradient has arrived"),
    "without loss scale": (without_loss_scale, False, "no update waits for a check of reduced gradients"),
    "not distributed": (not_distributed, False, NO_GRADIENTS),
    "loop": (sent_by(in_loop), True, "inside a condition or a loop: while/sent"),
    "condition": (sent_by(in_condition_with_more), True, "inside a condition or a loop: cond/sent"),
    "condition, v2": (sent_by(in_condition_with_more), False, "inside a function: cond/sent"),
    "applied in a function": (
        applied_in_function,
        False,
        "reduced gradients are used inside a function: cond",
    ),
}


@in_graph
def free_what_cannot_be_freed(kind, folder):
    """On a rank: what the pass says of a graph it leaves as it was, and what is in the folder."""
    build_step, is_classic, _ = NOT_FREED[kind]
    with control_flow(is_classic):
        build_step(Chain())
    graph = tf1.get_default_graph()
    before = {node.name: list(node.input) for node in graph.as_graph_def().node}
    TailOptimizationHook(folder).begin()
    now = {node.name: list(node.input) for node in graph.as_graph_def().node}
    assert {name: inputs for name, inputs in before.items() if now[name] != inputs} == {}
    report = tail_optimization_report_of(graph)
    assert not report.has_changed and report.unchanged_because in report.text() and report.advice in report.text()
    return report.unchanged_because


@pytest.mark.parametrize("kind", NOT_FREED)
def test_what_cannot_be_freed_stays_as_it_is_and_says_why(on_ranks, kind, tmp_path):
    *_, reason = NOT_FREED[kind]
    folder = tmp_path / "model"
    for why in on_ranks(2, free_what_cannot_be_freed, kind, str(folder)):
        assert reason in why
    if reason == NO_GRADIENTS:
        assert not folder.exists()
    else:
        assert reason in json.loads((folder / "tailing.json").read_text())["unchanged_because"]


def test_one_rank_alone_stays_as_it_is(graph):
    not_distributed(Chain())
    count = len(graph.get_operations())
    report = optimize_tail(graph, collective.current())
    assert report.unchanged_because == "one rank trains alone" and len(graph.get_operations()) == count


@in_graph
def train_session(is_tailing, is_monitored):
    """On a rank: trains in a session whose map asks for the pass; gives the variables and whether the pass has run."""
    model, train_op, _ = build("scale outside", False)
    start = tf1.global_variables_initializer()
    graph = tf1.get_default_graph()
    kind = tf1.train.MonitoredTrainingSession if is_monitored else tf1.Session
    with kind(config=settings(is_tailing)) as session:
        if not is_monitored:
            session.run(start)
        for step in range(5):
            session.run(
                train_op, {model.inputs: np.full([2, 8], step / 10), model.poison: np.nan if step == 2 else 0.0}
            )
        values = session.run({variable.name: variable for variable in tf1.global_variables()})
    report = tail_optimization_report_of(graph)
    return values, report is not None and report.has_changed


@on_each_rank(2)
@in_graph
def test_an_optimizer_that_was_told_not_to_is_left_alone():
    """The map of the session asks for tail optimisation, and the optimizer switches it off."""
    weight = tf1.get_variable("weight", [2], initializer=tf1.zeros_initializer())
    optimizer = NPUOptimizer(tf1.train.GradientDescentOptimizer(1.0), FixedLossScaleManager(8), True, True, False)
    train_op = optimizer.minimize(tf.reduce_sum(weight * float(collective.current().rank)))
    op_count = len(tf1.get_default_graph().get_operations())
    with open_session(is_tailing=True) as session:
        session.run(tf1.global_variables_initializer())
        session.run(train_op)
        grown = len(tf1.get_default_graph().get_operations()) - op_count
        assert session.run(weight).tolist() == [-0.5, -0.5]
    assert grown <= 1  # the initializer
    assert tail_optimization_report_of(tf1.get_default_graph()) is None


@pytest.mark.parametrize("is_monitored", [False, True])
def test_a_session_runs_the_pass_when_its_map_says_so(on_ranks, is_monitored):
    plain, tailed = (on_ranks(2, train_session, is_tailing, is_monitored) for is_tailing in (False, True))
    for (values, has_changed), (tailed_values, has_tailed) in zip(plain, tailed):
        assert_same_bits(tailed_values, values)
        assert (has_changed, has_tailed) == (False, True)


@in_graph
def train_with_a_decision_of_rank_0():
    """On a rank: steps of a graph in which rank 0 alone looks at reduced gradients; the report, and the variables."""
    model = Chain()
    optimizer = scaled(OPTIMIZERS["sgd"]())
    pairs = optimizer.compute_gradients(model.loss)
    if collective.current().rank == 0:
        is_finite = tf.reduce_all(tf.math.is_finite(pairs[0][0]))
        tf.cond(is_finite, lambda: tf.constant(1.0), lambda: tf.constant(0.0))
    train_op = optimizer.apply_gradients(pairs)
    report = optimize_tail(tf1.get_default_graph(), collective.current())
    with started_session() as session:
        for _ in range(2):
            session.run(train_op, {model.inputs: np.ones([2, 8], np.float32), model.poison: 0.0})
        return report.text(), session.run({variable.name: variable for variable in tf1.trainable_variables()})


def test_a_decision_that_only_one_rank_has_leaves_the_graphs_alone(on_ranks):
    (text, values), (other_text, other_values) = on_ranks(2, train_with_a_decision_of_rank_0)
    assert text == other_text
    assert "leaves this graph and its results unchanged" in text and "ranks would make different decisions" in text
    assert_same_bits(values, other_values)
