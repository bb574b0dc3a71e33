"""`iterations_per_loop` as scripts ask for it: in every kind of session they make, and in an `NPUEstimator`."""

from __future__ import annotations

import contextlib
import io
import logging
import os

import numpy as np
import pytest
import tensorflow as tf

from npu_bridge.estimator.npu import npu_session, util
from npu_bridge.estimator.npu.npu_config import NPURunConfig
from npu_bridge.estimator.npu.npu_estimator import NPUEstimator
from npu_bridge.estimator.npu.npu_helpers import npu_config_proto
from npu_bridge.estimator.npu.npu_hook import SetIterationsVarHook
from npu_bridge.options import with_optimizer_entry
from npu_bridge.reporting import History, HistoryHook, ProgressHook
from npu_bridge.session import steps_per_run
from tests.goldens.scaled_estimator import batches_of_rows, model_fn, scaled_step
from tests.goldens.two_layers import assert_same_bits
from tests.reporting.stepping import Clock

tf1 = tf.compat.v1
LOOP = 4
LOADED = {"iterations_per_loop": LOOP - 1, "loop_cond": 0, "zero": 0, "one": 1}
OVERFLOWING = 12


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


def test_illegal_arguments(graph, count):
    step, loop = count.assign_add(1).op, util.IterationPerLoop()
    with pytest.raises(AttributeError, match="create_iteration_per_loop_var"):
        loop.load_iteration_per_loop_var(None, 5)
    for train_op in (count.assign_add(1), count, "count", None):
        with pytest.raises(ValueError, match="train_op"):
            util.set_iteration_per_loop(None, train_op, 5)
        with pytest.raises(ValueError, match="train_op"):
            util.IterationPerLoop().create_iteration_per_loop_var(train_op)
    assert util.set_iteration_per_loop(None, step) is step
    assert util.set_iteration_per_loop(None, step, iterations_per_loop=1) is step
    assert not tf1.local_variables()
    loop.create_iteration_per_loop_var(step)
    for steps, error in ((0, ValueError), (-1, ValueError), (2.0, TypeError), (None, TypeError)):
        with pytest.raises(error, match="iterations_per_loop"):
            util.set_iteration_per_loop(None, step, steps)
        with pytest.raises(error, match="iterations_per_loop"):
            loop.load_iteration_per_loop_var(None, steps)
    for steps, error in ((0, ValueError), ("5", TypeError)):
        with pytest.raises(error, match="SetIterationsVarHook: iterations_per_loop"):
            SetIterationsVarHook(steps)
    hook = SetIterationsVarHook()  # what is missing is found out when it loads
    with pytest.raises(TypeError, match="SetIterationsVarHook: iterations_per_loop"):
        with tf1.train.MonitoredTrainingSession(hooks=[hook]):
            pass
    with tf.Graph().as_default(), pytest.raises(RuntimeError, match="npu_runconfig_one"):
        for number in range(2):
            tf1.add_to_collection("npu_runconfig_one", number)
        util.create_or_get_var("one")


def test_the_number_of_steps_may_change_in_a_finalized_graph(graph, count):
    loop = util.IterationPerLoop()
    step = loop.create_iteration_per_loop_var(count.assign_add(1).op)
    assert step.name == "IterationOp"
    with tf1.train.MonitoredTrainingSession() as session:
        session.run(step)
        assert session.run(count) == 1
        for size, reached in ((LOOP, 1 + LOOP), (1, 2 + LOOP), (2, 4 + LOOP)):
            loop.load_iteration_per_loop_var(session, size)
            assert loaded_values(session) == {**LOADED, "iterations_per_loop": size - 1}
            assert steps_per_run(session._tf_sess()) == size
            session.run(step)
            assert session.run(count) == reached
    check_variables(graph)


@pytest.mark.parametrize("option, warns", [(5, False), (4, True)])
def test_what_is_loaded_wins_over_the_session_key(graph, count, monkeypatch, caplog, option, warns):
    monkeypatch.setattr(tf1.Session, "__init__", tf1.Session.__init__)
    npu_session.decorate_sessions()
    caplog.set_level(logging.WARNING)
    config = with_optimizer_entry(None, {"iterations_per_loop": option})
    with tf1.Session(config=config) as session:
        session.run(count.initializer)
        loop_op = util.set_iteration_per_loop(session, count.assign_add(1).op, 5)
        session.run(loop_op)
        session.make_callable(loop_op)()
        assert session.run(count) == 10
    assert ("4 in the options of the session and 5 in the variable" in caplog.text) == warns


class Seen(tf.estimator.SessionRunHook):
    """The fetches of a hook, and the global step before and after every run."""

    def __init__(self, fetched):
        self.fetched, self.values, self.steps = fetched, [], []

    def before_run(self, run_context):
        self.asked = run_context.original_args.fetches
        self.before = self._step(run_context)
        return tf.estimator.SessionRunArgs(self.fetched)

    def after_run(self, run_context, run_values):
        self.values.append(run_values.results)
        self.steps.append((self.before, self._step(run_context)))

    def _step(self, run_context):
        return int(run_context.session.run(tf1.train.get_global_step(run_context.session.graph)))


class Model:
    """A weight that each step sets to the number of its batch, 0, 1, 2, ..."""

    def __init__(self):
        self.number = number = tf1.data.make_one_shot_iterator(tf.data.Dataset.range(100)).get_next()
        self.weight = tf1.get_variable("weight", initializer=tf.constant(-1, tf.int64))
        self.step = tf1.train.get_or_create_global_step()
        self.train_op = tf.group(self.weight.assign(number), tf1.assign_add(self.step, 1))


@contextlib.contextmanager
def plain(folder):
    with tf1.Session(config=npu_config_proto()) as session:
        session.run(tf1.global_variables_initializer())
        yield session


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


@pytest.mark.parametrize(
    "open_session, way",
    [
        (plain, "IterationPerLoop"),
        (supervised_and_stopped, "set_iteration_per_loop"),
        (monitored, "set_iteration_per_loop"),
    ],
)
def test_steps_in_a_run(open_session, way, graph, tmp_path, caplog):
    caplog.set_level(logging.INFO, "npu_bridge")
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
    assert "one-shot iterator" in caplog.text
    check_variables(graph)


def test_a_finalized_graph_says_how_to(graph, tmp_path):
    model = Model()
    with monitored(str(tmp_path)) as session:
        with pytest.raises(RuntimeError, match=r"set_iteration_per_loop: .*Expected .* Use IterationPerLoop"):
            util.set_iteration_per_loop(session, model.train_op, LOOP)
        assert util.set_iteration_per_loop(session, model.train_op, 1) is model.train_op


def test_a_training_in_loops_goes_on_from_its_checkpoint(tmp_path):
    for expected in (2 * LOOP, 4 * LOOP):
        with tf.Graph().as_default():
            model, loop = Model(), util.IterationPerLoop()
            loop_op = loop.create_iteration_per_loop_var(model.train_op)
            with monitored(str(tmp_path)) as session:
                loop.load_iteration_per_loop_var(session, LOOP)
                session.run(loop_op)
                session.run(loop_op)
                assert session.run(model.step) == expected
    assert tf.train.latest_checkpoint(str(tmp_path)).endswith(f"model.ckpt-{4 * LOOP}")
    names = {name for name, _ in tf.train.list_variables(str(tmp_path))}
    assert names == {"weight", "global_step"}, "the variables of loops are local"


def test_a_graph_that_was_saved_with_its_loop_is_imported_and_trained(graph, tmp_path):
    loop = util.IterationPerLoop()
    weight = tf1.get_variable("weight", initializer=[1.0, -2.0])
    step = loop.create_iteration_per_loop_var(scaled_step(tf.reduce_sum(tf.square(weight))))
    saver = tf1.train.Saver()
    with tf1.Session(config=npu_config_proto()) as session:
        session.run(tf1.global_variables_initializer())
        loop.load_iteration_per_loop_var(session, LOOP)
        session.run(step)
        path = saver.save(session, str(tmp_path / "model"))
        loop.load_iteration_per_loop_var(session, 1)
        session.run(step)
        expected = session.run({variable.op.name: variable for variable in tf1.global_variables()})
    assert any(op.type in ("Exit", "RefExit") for op in graph.get_operations()), "there was no loop to save"
    with tf.Graph().as_default() as imported, tf1.Session(config=npu_config_proto()) as session:
        restorer = tf1.train.import_meta_graph(f"{path}.meta")
        restorer.restore(session, path)
        session.run(imported.get_operation_by_name(step.name))
        assert_same_bits(session.run({variable.op.name: variable for variable in tf1.global_variables()}), expected)
        assert expected["global_step"] == LOOP + 1


def input_fn(batches=40):
    return batches_of_rows(batches, OVERFLOWING if batches > OVERFLOWING else None)


def estimator(folder, loop, **options):
    options = {"save_checkpoints_steps": 10, "log_step_count_steps": None, **options}
    return NPUEstimator(model_fn, config=NPURunConfig(model_dir=str(folder), iterations_per_loop=loop, **options))


def variables_of(trained):
    return {name: trained.get_variable_value(name) for name in trained.get_variable_names()}


def checkpoints_of(folder):
    names = [name for name in os.listdir(folder) if name.endswith(".index")]
    return sorted(int(name.removeprefix("model.ckpt-").removesuffix(".index")) for name in names)


def summaries_in(folder, tag):
    events = [name for name in os.listdir(folder) if name.startswith("events")]
    found = []
    for name in events:
        for event in tf1.train.summary_iterator(os.path.join(folder, name)):
            found.extend(event.step for value in event.summary.value if value.tag == tag)
    return found


def test_loops_leave_the_checkpoint_of_single_steps(tmp_path):
    seen, looped = Seen("the_loss:0"), estimator(tmp_path / "looped", 5)
    looped.train(input_fn, hooks=[seen], max_steps=20)
    assert seen.steps == [(0, 5), (5, 10), (10, 14), (14, 19), (19, 24)]  # one step is skipped
    assert checkpoints_of(tmp_path / "looped") == [0, 10, 24]
    assert seen.asked[0].name == "IterationOp"
    seen_singly, single = Seen("the_loss:0"), estimator(tmp_path / "single", 1)
    single.train(lambda: input_fn().take(25), hooks=[seen_singly])
    assert_same_bits(variables_of(looped), variables_of(single))
    assert seen.values == seen_singly.values[4::5]


def test_whole_loops_are_trained_and_told_and_evaluation_takes_one_batch_at_a_time(tmp_path, caplog):
    seen, trained = Seen("the_loss:0"), estimator(tmp_path, 4)
    trained.train(input_fn, hooks=[seen], max_steps=6)
    assert seen.steps == [(0, 4), (4, 8)]
    assert "got 6 further steps. Train 8" in caplog.text
    caplog.clear()
    trained.train(input_fn, steps=4, hooks=[seen])  # resumed
    assert seen.steps[2:] == [(8, 12)]
    assert "the last loop" not in caplog.text
    estimator(tmp_path, 5).train(input_fn, max_steps=17)  # the 5 steps that are left are a whole loop
    assert "the last loop" not in caplog.text
    assert trained.evaluate(lambda: input_fn(batches=8), steps=3)["global_step"] == 17
    predicted = [row["first"] for row in trained.predict(lambda: input_fn(batches=8))]
    np.testing.assert_array_equal(predicted, np.random.RandomState(5).randn(32, 4).astype("f")[:, 0])
    assert trained.get_variable_value("global_step") == 17


def test_files_and_reports_come_after_loops_and_count_steps_until_data_ends(tmp_path):
    out, history, clock = io.StringIO(), str(tmp_path / "history.jsonl"), Clock()

    class Tick(tf.estimator.SessionRunHook):
        def before_run(self, run_context):
            clock.now += 0.5

    progress = ProgressHook(every_n_steps=8, stream=out, clock=clock)
    hooks = [Tick(), progress, HistoryHook(history, every_n_steps=8)]
    trained = estimator(tmp_path, 4, save_checkpoints_steps=6, save_summary_steps=4, log_step_count_steps=8)
    trained.train(lambda: input_fn().skip(OVERFLOWING + 1), hooks=hooks)  # of 27 batches
    assert trained.get_variable_value("global_step") == 27
    assert checkpoints_of(tmp_path) == [0, 8, 16, 24, 27]
    assert set(summaries_in(tmp_path, "summarized")) == {4, 12, 20}
    assert set(summaries_in(tmp_path, "global_step/sec")) <= {8, 12, 16, 20, 24}
    assert set(summaries_in(tmp_path, "loss")) == {4, 8, 12, 16, 20, 24}
    lines = [line.split(" | ")[0].split(" (")[0] for line in out.getvalue().splitlines()]
    assert lines == ["step 4", "step 12", "step 20", "step 27"]
    assert " | 8.00 steps/s" in out.getvalue().splitlines()[2]
    assert [row.step for row in History(history).rows] == [4, 12, 20]
