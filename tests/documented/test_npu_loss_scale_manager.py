"""The documented loss-scale managers: state machine, limits, names in graphs and checkpoints."""

from __future__ import annotations

import numpy as np
import pytest
import tensorflow as tf

from npu_bridge.estimator.npu import npu_loss_scale_optimizer
from npu_bridge.estimator.npu.npu_loss_scale_manager import (
    ExponentialUpdateLossScaleManager,
    FixedLossScaleManager,
    LossScaleManager,
)
from npu_bridge.graph.control_flow import classic_control_flow
from tests.ranks.ways import started_session

tf1 = tf.compat.v1
pytestmark = pytest.mark.usefixtures("graph")

# (finite, scale after, (good, bad) after), from scale 1024, growth after 3, 2 to shrink
WORKED_EXAMPLE = [
    (True, 1024, (1, 0)),
    (True, 1024, (2, 0)),
    (False, 1024, (0, 1)),
    (True, 1024, (1, 1)),
    (True, 1024, (2, 1)),
    (True, 2048, (0, 0)),
    (False, 2048, (0, 1)),
    (True, 2048, (1, 1)),
    (False, 1638.4, (0, 0)),
    (True, 1638.4, (1, 0)),
    (True, 1638.4, (2, 0)),
    (True, 3276.8, (0, 0)),
]


def states_after(manager_arguments, finites):
    """The scale, and the counters of good and of bad steps, after each update in a TF 1 graph."""
    manager = ExponentialUpdateLossScaleManager(**manager_arguments)
    finite = tf1.placeholder(tf.bool, [])
    update = manager.update_loss_scale(finite)
    with started_session() as session:
        states = []
        for value in finites:
            session.run(update, {finite: value})
            states.append(tuple(session.run(["loss_scale:0", "good_steps:0", "bad_steps:0"])))
    return states


def test_worked_example_step_by_step():
    states = states_after({"init_loss_scale": 1024, "incr_every_n_steps": 3}, [row[0] for row in WORKED_EXAMPLE])
    assert states == [(np.float32(scale), *counters) for _, scale, counters in WORKED_EXAMPLE]


@pytest.mark.parametrize(
    "arguments, finites, expected",
    [
        (
            {"init_loss_scale": 1.2, "incr_every_n_steps": 2, "decr_every_n_nan_or_inf": 1},
            "NNFFN",
            [1, 1, 1, 2, 1.6],
        ),
        (
            {"init_loss_scale": 2.0**127, "incr_every_n_steps": 1, "decr_every_n_nan_or_inf": 1, "decr_ratio": 0.5},
            "FFN",
            [2.0**127, 2.0**127, 2.0**126],
        ),
        ({"init_loss_scale": 0.5, "incr_every_n_steps": 9, "decr_every_n_nan_or_inf": 1}, "FN", [0.5, 1]),
    ],
    ids=["shrinks to 1", "stops below the largest float32", "starts below 1"],
)
def test_limits_of_the_scale(arguments, finites, expected):
    scales = [scale for scale, *_ in states_after(arguments, [letter == "F" for letter in finites])]
    np.testing.assert_array_equal(np.float32(scales), np.float32(expected))


def test_variables_are_global_not_trainable_and_named_as_in_checkpoints():
    ExponentialUpdateLossScaleManager(1024, 3)
    with tf1.name_scope("second"):
        ExponentialUpdateLossScaleManager(2048, 3)
    ExponentialUpdateLossScaleManager(4096, 3)
    names = {variable.name[:-2]: variable.dtype.base_dtype for variable in tf1.global_variables()}
    assert names == {
        f"{prefix}{name}{suffix}": dtype
        for prefix, suffix in (("", ""), ("second/", ""), ("", "_1"))
        for name, dtype in (("loss_scale", tf.float32), ("good_steps", tf.int32), ("bad_steps", tf.int32))
    }
    assert tf1.trainable_variables() == []


def test_a_scale_fetched_with_the_step_is_the_one_that_the_step_used():
    """It moves at every step, up and down, and nothing but chance would order a fetch before the update."""
    finite = tf1.placeholder(tf.bool, [])
    manager = ExponentialUpdateLossScaleManager(1024, 1, 1, decr_ratio=0.5)
    used = manager.get_loss_scale() * 1
    update = manager.update_loss_scale(finite)
    with started_session() as session:
        expected = 1024.0
        for step in range(60):
            is_finite = step % 3 != 2
            by_name, of_step, _ = session.run(["loss_scale:0", used, update], {finite: is_finite})
            assert by_name == of_step == expected
            expected *= 2 if is_finite else 0.5
            assert session.run("loss_scale:0") == session.run(manager.get_loss_scale()) == expected


def test_a_checkpoint_of_a_variable_of_that_name_is_restored(tmp_path):
    """As other stacks and earlier versions save it; also by savers that are given the variables by their names."""
    with tf.Graph().as_default(), tf1.Session() as session:
        values = {"loss_scale": 64.0, "good_steps": 3, "bad_steps": 1}
        saved = [tf1.Variable(value, name=name, use_resource=False) for name, value in values.items()]
        session.run(tf1.global_variables_initializer())
        path = tf1.train.Saver(saved).save(session, str(tmp_path / "model"))
    manager = ExponentialUpdateLossScaleManager(1024, 4)
    update = manager.update_loss_scale(tf.constant(True))
    savers = [tf1.train.Saver(), tf1.train.Saver({var.name[:-2]: var for var in manager.variables})]
    with started_session() as session:
        for saver in savers:
            saver.restore(session, path)
            assert session.run(["loss_scale:0", "good_steps:0", "bad_steps:0"]) == [64, 3, 1]
            session.run(update)
            assert session.run(["loss_scale:0", "good_steps:0", "bad_steps:0"]) == [128, 0, 0]
            tf1.train.export_meta_graph()
            saver.save(session, str(tmp_path / "again"))
            saved = {name for name, _ in tf.train.list_variables(str(tmp_path / "again"))}
            assert saved == {"loss_scale", "good_steps", "bad_steps"}


def test_fixed_scale_is_a_constant_of_that_name():
    manager = FixedLossScaleManager(8589935000.0)
    assert manager.get_enable_overflow_check() is True
    assert FixedLossScaleManager(1, enable_overflow_check=False).get_enable_overflow_check() is False
    with tf1.Session() as session:
        assert session.run("loss_scale:0") == session.run(manager.get_loss_scale()) == np.float32(8589935000.0)
        session.run(manager.update_loss_scale(tf.constant(False)))
        assert session.run("loss_scale:0") == np.float32(8589935000.0)


def test_both_branches_of_a_condition_read_the_fixed_scale():
    with tf.Graph().as_default():
        manager = FixedLossScaleManager(8)
    is_first = tf1.placeholder(tf.bool, [])
    with classic_control_flow():
        scale = tf1.cond(is_first, lambda: manager.get_loss_scale() * 1, lambda: manager.get_loss_scale() * 2)
    with tf1.Session() as session:
        assert [session.run(scale, {is_first: value}) for value in (True, False)] == [8.0, 16.0]


def test_managers_share_a_base_and_a_second_home():
    assert issubclass(FixedLossScaleManager, LossScaleManager)
    assert issubclass(ExponentialUpdateLossScaleManager, LossScaleManager)
    assert npu_loss_scale_optimizer.FixedLossScaleManager is FixedLossScaleManager


def test_can_be_made_under_control_dependencies_that_need_data():
    """A batch-norm update op in the surroundings must not become part of the initialiser."""
    data = tf1.placeholder(tf.float32, [])
    with tf.control_dependencies([tf.identity(data)]):
        ExponentialUpdateLossScaleManager(1024, 3)
    with started_session():  # without feeding
        pass


@pytest.mark.parametrize("never", [2**31, 10**30], ids=str)
def test_a_count_that_no_counter_reaches_means_never(never):
    arguments = {"init_loss_scale": 8.0, "incr_every_n_steps": never, "decr_every_n_nan_or_inf": never}
    assert [scale for scale, *_ in states_after(arguments, [True, True, False, True])] == [8.0] * 4


def test_counters_stop_at_their_limit_instead_of_starting_again_below_zero():
    manager = ExponentialUpdateLossScaleManager(8.0, 2**31, 2**31)
    reached = ExponentialUpdateLossScaleManager(8.0, 2**31 - 1)
    updates = [each.update_loss_scale(tf.constant(True)) for each in (manager, reached)]
    skipped = manager.update_loss_scale(tf.constant(False))
    with started_session() as session:
        for each in (manager, reached):
            each._good_steps.load(2**31 - 2, session)
        for expected in ((2**31 - 1, 8.0), (2**31 - 1, 8.0)):
            session.run(updates[0])
            assert tuple(session.run([manager._good_steps, manager._loss_scale])) == expected
        session.run(updates[1])
        assert tuple(session.run([reached._good_steps, reached._loss_scale])) == (0, 16.0)
        manager._bad_steps.load(2**31 - 1, session)
        session.run(skipped)
        assert session.run(manager._bad_steps) == 2**31 - 1


@pytest.mark.parametrize("is_made_eagerly", [False, True])
def test_a_manager_moves_a_scale_in_each_graph_that_asks_for_it(is_made_eagerly):
    """A script makes one at its top level; an Estimator trains and evaluates in graphs of its own."""
    with tf.init_scope() if is_made_eagerly else tf.Graph().as_default():
        manager = ExponentialUpdateLossScaleManager(8.0, 2, 1, 2, 0.5)
    for is_finite, expected in ((True, 16.0), (False, 2.0)):
        with tf.Graph().as_default():
            with tf.name_scope("train"):
                update = manager.update_loss_scale(tf.constant(is_finite))
            names = sorted(variable.name for variable in tf1.global_variables())
            assert names == ["bad_steps:0", "good_steps:0", "loss_scale:0"]
            with started_session() as session:
                assert session.run("loss_scale:0") == 8.0
                for _ in range(2):
                    session.run(update)
                assert session.run(manager.get_loss_scale()) == expected
                assert manager.get_state(session).scale == expected
                manager.set_loss_scale(64.0, session)
                assert session.run("loss_scale:0") == 64.0


def test_errors_are_short_whatever_they_quote():
    for arguments in ((10**5000, 2), ("x" * 9999, 2), (1e-40, 2), (8.0, "9" * 9999), (8.0, -(10**5000))):
        with pytest.raises((TypeError, ValueError), match="ExponentialUpdateLossScaleManager: i") as caught:
            ExponentialUpdateLossScaleManager(*arguments)
        assert len(str(caught.value)) < 500


def test_a_loop_reads_the_scale_again(graph):
    manager = ExponentialUpdateLossScaleManager(4.0, 1)
    manager.get_loss_scale()

    def body(step, _):
        with tf.control_dependencies([manager.update_loss_scale(tf.constant(True))]):
            return step + 1, manager.get_loss_scale()

    with classic_control_flow():
        _, last = tf.compat.v1.while_loop(lambda step, _: step < 3, body, [0, 0.0])
    with started_session() as session:
        assert session.run(last) == 32.0
