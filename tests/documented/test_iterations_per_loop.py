"""The documented facts of `set_iteration_per_loop`, `IterationPerLoop`, `SetIterationsVarHook` and their variables."""

from __future__ import annotations

import logging

import pytest
import tensorflow as tf

from npu_bridge.estimator.npu import npu_session, util
from npu_bridge.estimator.npu.npu_hook import SetIterationsVarHook
from npu_bridge.options import with_entry

tf1 = tf.compat.v1
LOADED = {"iterations_per_loop": 4, "loop_cond": 0, "zero": 0, "one": 1}


@pytest.fixture
def count(graph):
    return tf1.get_variable("count", initializer=0)


def loaded_values(session):
    return {name: session.run(util.create_or_get_var(name)) for name in LOADED}


def check_variables(graph):
    for name in LOADED:
        variable = util.create_or_get_var(name)
        assert variable is util.create_or_get_var(name)
        assert variable.name == f"npu_runconfig/{name}:0"
        assert (variable.dtype, variable.shape, variable.trainable) == (tf.int64, [], False)
        assert variable.op.type == "VarHandleOp"
        assert graph.get_collection(f"npu_runconfig_{name}") == [variable]
        assert variable in tf1.local_variables()
        assert variable not in tf1.global_variables()


def test_set_iteration_per_loop(graph, count):
    with tf1.Session() as session:
        session.run(count.initializer)
        step = util.set_iteration_per_loop(session, count.assign_add(1).op, 5)
        assert (step.name, type(step)) == ("IterationOp", tf.Operation)
        assert loaded_values(session) == LOADED
        session.run(step)
        assert session.run(count) == 5
    check_variables(graph)


def test_one_step_is_the_train_op_itself(graph, count):
    step = count.assign_add(1).op
    assert util.set_iteration_per_loop(None, step) is step
    assert util.set_iteration_per_loop(None, step, iterations_per_loop=1) is step
    assert not tf1.local_variables()


@pytest.mark.parametrize("steps, error", [(0, ValueError), (-1, ValueError), (2.0, TypeError), (None, TypeError)])
def test_illegal_numbers_of_steps(graph, count, steps, error):
    step = count.assign_add(1).op
    loop = util.IterationPerLoop()
    loop.create_iteration_per_loop_var(step)
    for call in (
        lambda: util.set_iteration_per_loop(None, step, steps),
        lambda: loop.load_iteration_per_loop_var(None, steps),
    ):
        with pytest.raises(error, match="iterations_per_loop"):
            call()


def test_the_train_op_is_an_operation(graph, count):
    for train_op in (count.assign_add(1), count, "count", None):
        with pytest.raises(ValueError, match="train_op"):
            util.set_iteration_per_loop(None, train_op, 5)
        with pytest.raises(ValueError, match="train_op"):
            util.IterationPerLoop().create_iteration_per_loop_var(train_op)


def test_iteration_per_loop_with_a_finalized_graph(graph, count):
    loop = util.IterationPerLoop()
    step = loop.create_iteration_per_loop_var(count.assign_add(1).op)
    assert step.name == "IterationOp"
    with tf1.train.MonitoredTrainingSession() as session:
        session.run(step)
        assert session.run(count) == 1
        loop.load_iteration_per_loop_var(session, 5)
        assert loaded_values(session) == LOADED
        session.run(step)
        assert session.run(count) == 6
        loop.load_iteration_per_loop_var(session)
        assert session.run(util.create_or_get_var("iterations_per_loop")) == 0
        session.run(step)
        assert session.run(count) == 7
    check_variables(graph)


def test_loading_needs_creating():
    with pytest.raises(AttributeError, match="create_iteration_per_loop_var"):
        util.IterationPerLoop().load_iteration_per_loop_var(None, 5)


def test_two_variables_of_a_name_are_an_error(graph):
    for number in range(2):
        tf1.add_to_collection("npu_runconfig_one", number)
    with pytest.raises(RuntimeError, match="npu_runconfig_one"):
        util.create_or_get_var("one")


def test_the_hook(graph, count):
    step = tf.group(count.assign_add(1), name="IterationOp")
    with tf1.train.MonitoredTrainingSession(hooks=[SetIterationsVarHook(5)]) as session:
        assert loaded_values(session) == LOADED
        session.run(step)
        assert session.run(count) == 5
    check_variables(graph)


def test_illegal_numbers_of_the_hook(graph, count):
    for steps, error in ((0, ValueError), ("5", TypeError)):
        with pytest.raises(error, match="SetIterationsVarHook: iterations_per_loop"):
            SetIterationsVarHook(steps)
    hook = SetIterationsVarHook()  # what is missing is found out when it loads
    with pytest.raises(TypeError, match="SetIterationsVarHook: iterations_per_loop"):
        with tf1.train.MonitoredTrainingSession(hooks=[hook]):
            pass


@pytest.mark.parametrize("option, warns", [(5, False), (4, True)])
def test_what_is_loaded_wins_over_the_session_key(graph, count, monkeypatch, caplog, option, warns):
    monkeypatch.setattr(tf1.Session, "__init__", tf1.Session.__init__)
    npu_session.decorate_sessions()
    caplog.set_level(logging.WARNING)
    config = with_entry(None, {"iterations_per_loop": option})
    with tf1.Session(config=config) as session:
        session.run(count.initializer)
        session.run(util.set_iteration_per_loop(session, count.assign_add(1).op, 5))
        assert session.run(count) == 5
    assert ("4 in the options of the session and 5 in the variable" in caplog.text) == warns
