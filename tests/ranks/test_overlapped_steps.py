"""Steps that overlap compute the bits of steps one by one: every way to train, through overflows and ends of data."""

from __future__ import annotations

import os
from unittest import mock

import numpy as np
import pytest
import tensorflow as tf

from npu_bridge import collective
from npu_bridge.base.session_wrapper import find_engine
from npu_bridge.collective.cost_model import LEAST_STEPS
from npu_bridge.collective.order_on_the_wire import dependencies_for_order, gradient_all_reduces, order_for_forward_pass
from npu_bridge.estimator.npu.npu_config import NPURunConfig
from npu_bridge.estimator.npu.npu_loss_scale_manager import ExponentialUpdateLossScaleManager
from npu_bridge.estimator.npu.npu_optimizer import NPUOptimizer
from npu_bridge.gradients.stages.all_reduce import AllReduce
from npu_bridge.graph.operators import computed_ops
from npu_bridge.graph.overlapped_loop import put_in_overlapped_loop
from npu_bridge.optimizers import tf1 as ours
from npu_bridge.options import of_graph
from npu_bridge.options.environment_table import VARIABLES
from npu_bridge.options.reading import read_run_config
from npu_bridge.session.iterations import _LoopEngine, name_step, train_in_loops
from npu_bridge.stages import Accumulate
from tests.goldens.two_layers import OPTIMIZERS, as_built_by_many, assert_all_finite, assert_same_bits, in_graph
from tests.rank_pool import on_each_rank

tf1 = tf.compat.v1
STEPS = 50
WIDTH, DEPTH, ROWS, WORDS = 24, 3, 4, 12

OPTIMIZERS_HERE = {
    **{name: OPTIMIZERS[name] for name in ("momentum", "adam", "lamb")},
    "our_lamb": lambda: ours.LAMB(0.05, weight_decay=0.01),
    "our_fused_lamb": lambda: ours.LAMB(0.05, weight_decay=0.01, fused=True),
}
# The optimizer, whether its tail is optimised (None: no loss scale), resource variables, batches that are added up.
CASES = {
    "momentum": ("momentum", True, True),
    "adam": ("adam", True, True),
    "adam_of_references": ("adam", True, False),
    "adam_with_decision_at_the_end": ("adam", False, True),
    "adam_without_loss_scale": ("adam", None, True),
    "momentum_without_loss_scale_of_references": ("momentum", None, False),
    "lamb_of_addons": ("lamb", True, True),
    "our_lamb_of_references": ("our_lamb", True, False),
    "our_fused_lamb_of_references": ("our_fused_lamb", True, False),
    "accumulated": ("adam", True, True, 2),
}


def batches(rank, overflows=True):
    """Rows of words and labels; some of the labels may overflow, on this rank alone."""
    random = np.random.RandomState(3 + rank)
    tokens = random.randint(0, WORDS, [STEPS, ROWS])
    labels = random.randn(STEPS, ROWS).astype("f")
    if overflows:
        labels[random.rand(STEPS) < 0.08, 0] = np.inf
    return tf.data.Dataset.from_tensor_slices((tokens, labels))


def loss_of(tokens, labels, use_resource):
    def variable(name, *shape):
        initializer = tf1.random_normal_initializer(stddev=0.2, seed=len(name))
        return tf1.get_variable(name, shape, initializer=initializer, use_resource=use_resource)

    values = tf.nn.embedding_lookup(variable("embedding", WORDS, WIDTH), tokens)
    for layer in range(DEPTH):
        values = tf.tanh(tf.matmul(values, variable(f"layer_{layer}", WIDTH, WIDTH)) + variable(f"bias_{layer}", WIDTH))
    return tf.reduce_mean(tf.square(tf.reduce_sum(values, 1) - labels))


# With more than two ranks on the cores, and without another rank to exchange with.
OF_OTHER_SIZES = ("adam", "momentum_without_loss_scale_of_references", "accumulated")


def build(case):
    name, is_tailing, use_resource, *accumulated = CASES[case]
    with tf1.variable_scope(case):
        # Without a loss scale nothing is skipped: one overflow, and all that follows is NaN.
        scaled = is_tailing is not None
        iterator = tf1.data.make_initializable_iterator(batches(collective.current().rank, overflows=scaled))
        tf1.add_to_collection(tf1.GraphKeys.TABLE_INITIALIZERS, iterator.initializer)
        loss = loss_of(*iterator.get_next(), use_resource)
        manager = ExponentialUpdateLossScaleManager(2.0**10, 4, 1, 2, 0.5) if scaled else None
        stages = [Accumulate(*accumulated)] if accumulated else []
        optimizer = NPUOptimizer(
            OPTIMIZERS_HERE[name](), manager, True, scaled, bool(is_tailing), name=case, stages=stages
        )
        kind = {"trainable": False, "use_resource": use_resource}
        return optimizer.minimize(loss, tf1.get_variable("step", [], tf.int64, tf1.zeros_initializer(), **kind))


def overlapped(step, early):
    """The loop of a step, whose gradients are sent in the order that its early share says."""
    ops = computed_ops([step])
    transfers = gradient_all_reduces(ops)
    assert collective.current().size == 1 or (transfers and all(len(each) >= 4 for each in transfers))
    waits: dict = {}
    for each in transfers:
        waits.update(dependencies_for_order(ops, order_for_forward_pass(each, early)))
    return put_in_overlapped_loop(tf1.get_default_graph(), [step], control_inputs_of_copies=waits)


@mock.patch.dict(os.environ, FUSION_TENSOR_SIZE=str(4 * WIDTH * WIDTH))
@in_graph
def train(cases, is_overlapped, early):
    """On a rank: trains each case to the end of its data; gives all variables, half-way and at the end."""
    steps = {case: build(case) for case in cases}
    loops = {case: overlapped(step, early) for case, step in steps.items()} if is_overlapped else {}
    found = []
    with tf1.Session(config=as_built_by_many()) as session:
        session.run([tf1.global_variables_initializer(), tf1.tables_initializer()])

        def go_on(case, count):
            if loops:
                session.run(loops[case].op, {loops[case].count: count})
            else:
                for _ in range(count):
                    session.run(steps[case])

        for case in cases:
            go_on(case, 20)
        found.append(session.run({variable.name: variable for variable in tf1.global_variables()}))
        for case in cases:
            with pytest.raises(tf.errors.OutOfRangeError):
                go_on(case, STEPS)
        found.append(session.run({variable.name: variable for variable in tf1.global_variables()}))
    return found


@pytest.mark.few_fast(1, "every case and four ranks take minutes")
@pytest.mark.parametrize(
    ("rank_count", "cases"),
    [(2, ("accumulated",)), (1, OF_OTHER_SIZES), (2, tuple(CASES)), (4, OF_OTHER_SIZES)],
)
def test_overlapped_steps_compute_the_same_bits(on_ranks, rank_count, cases):
    expected, found = (on_ranks(rank_count, train, cases, way, 0.4, time_limit_secs=600) for way in (False, True))
    for one, other in zip(found, expected):
        for values, values_expected in zip(one, other):
            assert_same_bits(values, values_expected)
    final = expected[0][1]
    assert_all_finite({name: value for name, value in final.items() if "/layer_" in name})
    assert all(0 < final[f"{case}/step:0"] < STEPS for case in cases if CASES[case][1] is not None), "no step skipped"


@on_each_rank(2)
def test_gradients_are_sent_in_small_pieces_only_where_steps_can_overlap():
    for steps, expected in ((1, 8_000_000), (LEAST_STEPS, 8_000_000), (LEAST_STEPS + 1, 2_700_000)):
        with tf.Graph().as_default() as graph:
            of_graph.record_options(read_run_config(NPURunConfig(iterations_per_loop=steps)), graph)
            assert AllReduce("sent").agreed_settings([])["FUSION_TENSOR_SIZE"] == expected, steps
    assert f"with iterations_per_loop above {LEAST_STEPS}." in str(VARIABLES), "what users read"


@mock.patch.dict(os.environ, NPU_OVERLAPPED_STEPS="")
@mock.patch("npu_bridge.session.overlapped_steps.LEAST_WAIT", 0.0)
@mock.patch("npu_bridge.session.overlapped_steps._LONGEST_CALL_SECS", 1e6)  # however busy the machine is
@in_graph
def train_by_trial(steps_per_run, runs):
    """On a rank: trains in a session that tries both ways; gives which one it has kept, and all variables."""
    step = name_step(build("adam_without_loss_scale"))
    with tf1.Session() as session:
        session.run([tf1.global_variables_initializer(), tf1.tables_initializer()])
        train_in_loops(session, steps_per_run)
        for _ in range(runs):
            session.run(step)
        ways = [] if steps_per_run == 1 else find_engine(session, _LoopEngine)._earlier_steps.values()
        kept = [(way._overlaps, {known: len(secs) for known, secs in way._secs.items()}) for way in ways]
        return kept, session.run({variable.name: variable for variable in tf1.global_variables()})


@pytest.mark.slow("for speed and not for numbers")
def test_ranks_try_both_ways_and_keep_the_same_one(on_ranks):
    expected = on_ranks(2, train_by_trial, 1, 50)
    found = on_ranks(2, train_by_trial, 5, 10)
    (((first, tried),), _), (((second, _),), _) = found
    assert tried == {False: 4, True: 4}
    assert first is second is not None
    for (_, one), (_, other) in zip(found, expected):
        assert_same_bits(one, other)
