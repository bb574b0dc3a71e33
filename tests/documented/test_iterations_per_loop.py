"""`set_iteration_per_loop`, `IterationPerLoop` and `SetIterationsVarHook`, in every kind of session a script makes."""

from __future__ import annotations

import contextlib
import logging
import os

import pytest
import tensorflow as tf

from npu_bridge.estimator.npu import npu_session, util
from npu_bridge.estimator.npu.npu_helpers import npu_config_proto
from npu_bridge.estimator.npu.npu_hook import NPUCheckpointSaverHook, SetIterationsVarHook
from npu_bridge.options import with_entry

tf1 = tf.compat.v1
LOOP = 4
LOADED = {"iterations_per_loop": LOOP - 1, "loop_cond": 0, "zero": 0, "one": 1}


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
        loop.load_iteration_per_loop_var(session, LOOP)
        assert loaded_values(session) == LOADED
        session.run(step)
        assert session.run(count) == 1 + LOOP
        loop.load_iteration_per_loop_var(session)
        assert session.run(util.create_or_get_var("iterations_per_loop")) == 0
        session.run(step)
        assert session.run(count) == 2 + LOOP
    check_variables(graph)


def test_loading_needs_creating():
    with pytest.raises(AttributeError, match="create_iteration_per_loop_var"):
        util.IterationPerLoop().load_iteration_per_loop_var(None, 5)


def test_two_variables_of_a_name_are_an_error(graph):
    for number in range(2):
        tf1.add_to_collection("npu_runconfig_one", number)
    with pytest.raises(RuntimeError, match="npu_runconfig_one"):
        util.create_or_get_var("one")


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


class Model:
    """A weight that each step sets to the number of its batch, 0, 1, 2, ..."""

    def __init__(self):
        number = tf1.data.make_one_shot_iterator(tf.data.Dataset.range(100)).get_next()
        self.weight = tf1.get_variable("weight", initializer=tf.constant(-1, tf.int64))
        self.step = tf1.train.get_or_create_global_step()
        self.train_op = tf.group(self.weight.assign(number), tf1.assign_add(self.step, 1))


@contextlib.contextmanager
def plain(folder):
    with tf1.Session(config=npu_config_proto()) as session:
        session.run(tf1.global_variables_initializer())
        yield session


@contextlib.contextmanager
def interactive(folder):
    session = tf1.InteractiveSession(config=npu_config_proto())
    tf1.global_variables_initializer().run()
    yield session
    session.close()


@contextlib.contextmanager
def supervised(folder):
    supervisor = tf1.train.Supervisor(logdir=folder, save_model_secs=0, save_summaries_secs=0)
    with supervisor.managed_session(config=npu_config_proto()) as session:
        yield session
        supervisor.saver.save(session, os.path.join(folder, "model.ckpt"), global_step=supervisor.global_step)


@contextlib.contextmanager
def supervised_and_stopped(folder):
    supervisor = tf1.train.Supervisor(logdir=folder, save_summaries_secs=0, save_model_secs=0)
    session = supervisor.prepare_or_wait_for_session(config=npu_config_proto())
    yield session
    supervisor.stop()


@contextlib.contextmanager
def monitored(folder):
    with tf1.train.MonitoredTrainingSession(
        checkpoint_dir=folder, save_checkpoint_steps=LOOP, config=npu_config_proto()
    ) as session:
        yield session


SESSIONS = (plain, interactive, supervised, supervised_and_stopped, monitored)


@pytest.mark.parametrize("open_session", SESSIONS)
@pytest.mark.parametrize("way", ["IterationPerLoop", "set_iteration_per_loop"])
def test_steps_in_a_run(open_session, way, graph, tmp_path):
    model, loop = Model(), util.IterationPerLoop()
    if way == "IterationPerLoop":
        loop_op = loop.create_iteration_per_loop_var(model.train_op)
    with open_session(str(tmp_path)) as session:
        if way == "IterationPerLoop":
            loop.load_iteration_per_loop_var(session, LOOP)
        else:
            graph._unsafe_unfinalize()  # as scripts do it after a Supervisor
            loop_op = util.set_iteration_per_loop(session, model.train_op, iterations_per_loop=LOOP)
        assert (loop_op.name, type(loop_op)) == ("IterationOp", tf.Operation)
        assert loaded_values(session) == LOADED
        for loops in (1, 2, 3):
            session.run(loop_op)
            assert session.run([model.step, model.weight]) == [LOOP * loops, LOOP * loops - 1]
        session.run(model.train_op)  # one step
        assert session.run(model.step) == 3 * LOOP + 1
    check_variables(graph)


@pytest.mark.parametrize("open_session", [supervised, supervised_and_stopped, monitored])
def test_a_finalized_graph_says_how_to(open_session, graph, tmp_path):
    model = Model()
    with open_session(str(tmp_path)) as session:
        with pytest.raises(RuntimeError, match=r"set_iteration_per_loop: .*Expected .* Use IterationPerLoop"):
            util.set_iteration_per_loop(session, model.train_op, LOOP)
        assert util.set_iteration_per_loop(session, model.train_op, 1) is model.train_op


@pytest.mark.parametrize("open_session", [supervised, monitored])
def test_a_training_in_loops_goes_on_from_its_checkpoint(open_session, tmp_path):
    for expected in (2 * LOOP, 4 * LOOP):
        with tf.Graph().as_default():
            model, loop = Model(), util.IterationPerLoop()
            loop_op = loop.create_iteration_per_loop_var(model.train_op)
            with open_session(str(tmp_path)) as session:
                loop.load_iteration_per_loop_var(session, LOOP)
                session.run(loop_op)
                session.run(loop_op)
                assert session.run(model.step) == expected
    assert tf.train.latest_checkpoint(str(tmp_path)).endswith(f"model.ckpt-{4 * LOOP}")
    names = {name for name, _ in tf.train.list_variables(str(tmp_path))}
    assert names == {"weight", "global_step"}, "the variables of loops are local"


def test_hooks_of_a_monitored_session_work_in_loops(graph, tmp_path):
    model, saved = Model(), []

    class Listener(tf.estimator.CheckpointSaverListener):
        def after_save(self, session, global_step_value):
            saved.append(int(global_step_value))

    loop_op = tf.group(model.train_op, name="IterationOp")
    scaffold = tf1.train.Scaffold()
    hooks = [
        SetIterationsVarHook(LOOP),
        NPUCheckpointSaverHook(str(tmp_path), save_steps=6, scaffold=scaffold, listeners=[Listener()]),
        tf.estimator.StopAtStepHook(last_step=14),
    ]
    with tf1.train.SingularMonitoredSession(hooks, scaffold, config=npu_config_proto()) as session:
        assert loaded_values(session) == LOADED
        while not session.should_stop():
            session.run(loop_op)
    check_variables(graph)
    assert saved == [0, 8, 16], "saved, and ended, after the loop in which it was due"
