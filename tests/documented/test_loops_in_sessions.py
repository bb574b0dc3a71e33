"""Loops of steps in every kind of session that scripts write themselves, and where such a training ends and resumes."""

from __future__ import annotations

import contextlib
import os

import pytest
import tensorflow as tf

from npu_bridge.estimator.npu import util
from npu_bridge.estimator.npu.npu_helpers import npu_config_proto
from npu_bridge.estimator.npu.npu_hook import NPUCheckpointSaverHook, SetIterationsVarHook

tf1 = tf.compat.v1
LOOP = 4


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
        for loops in (1, 2, 3):
            session.run(loop_op)
            assert session.run([model.step, model.weight]) == [LOOP * loops, LOOP * loops - 1]
        session.run(model.train_op)  # one step
        assert session.run(model.step) == 3 * LOOP + 1


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
        while not session.should_stop():
            session.run(loop_op)
    assert saved == [0, 8, 16], "saved, and ended, after the loop in which it was due"
