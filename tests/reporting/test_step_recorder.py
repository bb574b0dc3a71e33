"""The recorder around real sessions: which runs train, which step they are, what is written."""

from __future__ import annotations

import json

import pytest
import tensorflow as tf

from npu_bridge.base.session_wrapper import add_engine
from npu_bridge.reporting.step_recorder import StepRecorder
from npu_bridge.session import name_step, train_in_loops
from npu_bridge.session.hooked_session import TrainingHookEngine
from npu_run.timeline import Recording
from tests.session.precision.small_models import classic_loops

tf1 = tf.compat.v1


@pytest.fixture
def record(graph, tmp_path):
    """Runs fetches one after the other under a recorder; gives the steps in the file and the step last seen."""

    def run(steps, *fetches):
        recorder = StepRecorder(steps, str(tmp_path / "trace.json"), rank=0)
        watch = TrainingHookEngine([recorder])
        with tf1.Session(graph=graph) as session:
            add_engine(session, watch)
            for each in fetches:
                session.run(each)
        recorder.finish()
        facts = json.loads((tmp_path / "trace.json").read_text())["npu_bridge"]
        return [step["step"] for step in facts["steps"]], facts["last_step_seen"]

    return run


def minimized(around=lambda apply: apply()):
    weight = tf1.get_variable("weight", [3], use_resource=True)
    step = tf1.train.get_or_create_global_step()
    optimizer = tf1.train.GradientDescentOptimizer(0.1)
    gradients = optimizer.compute_gradients(tf.reduce_sum(weight * weight))
    return around(lambda: optimizer.apply_gradients(gradients, step))


def test_only_runs_that_train_are_counted_and_the_global_step_counts(graph, record):
    train = minimized()
    initialize = tf1.global_variables_initializer()
    weight = tf1.trainable_variables()[0]
    jump = tf1.assign(tf1.train.get_global_step(), 10)
    runs = [initialize, train, weight, [train, weight], jump, {"a": [train]}, weight, train, train]
    assert record(range(1, 12), *runs) == ([1, 10, 11], 11)


def test_without_a_global_step_runs_are_counted(graph, record):
    weight = tf1.get_variable("weight", [3])
    train = tf1.train.AdamOptimizer(0.1).minimize(tf.reduce_sum(weight * weight))
    assert record(range(1, 3), tf1.global_variables_initializer(), *[train] * 5) == ([1, 2], 2)


def test_an_update_of_assignments_trains_where_steps_are_counted_if_only_behind_a_gate(graph, record):
    weight = tf1.get_variable("weight", [3], use_resource=True)
    move = tf1.assign(weight, weight * 0.9)
    runs = [tf1.global_variables_initializer(), move, move]
    assert record(range(0, 2), *runs) == ([], None)
    counter = tf1.train.get_or_create_global_step()
    with classic_loops():
        gated = tf1.cond(weight[0] < 1e9, lambda: tf.group(move, tf1.assign_add(counter, 1)), tf.no_op)
    assert record(range(0, 2), tf1.global_variables_initializer(), gated, gated) == ([0, 1], 1)


def test_updates_inside_functions_are_found(graph, record):
    with classic_loops(are_classic=False):
        train = minimized(lambda apply: tf1.cond(tf1.trainable_variables()[0][0] < 1e9, apply, tf.no_op))
    assert not [op for op in graph.get_operations() if "ApplyGradient" in op.type]
    assert record(range(0, 2), tf1.global_variables_initializer(), train, train) == ([0, 1], 1)


def train_twice(graph, recorder, loop=1):
    """Two runs of some steps under a recorder; gives the global step after them."""
    train = name_step(minimized())
    with tf1.Session(graph=graph) as session:
        session.run(tf1.global_variables_initializer())
        train_in_loops(session, loop)
        add_engine(session, TrainingHookEngine([recorder]))
        for _ in range(2):
            session.run(train)
        return session.run(tf1.train.get_global_step())


def test_runs_of_threads_that_share_a_session_keep_their_steps(graph, tmp_path):
    recorder = StepRecorder(range(1, 2), str(tmp_path / "trace.json"), rank=0)
    step, metadata = tf1.train.get_or_create_global_step(), tf1.RunMetadata()
    with tf1.Session(graph=graph) as session:
        contexts = [tf.estimator.SessionRunContext(tf.estimator.SessionRunArgs(None), session) for _ in range(2)]
        for number, context in enumerate(contexts):
            step.load(number, session)
            asked = recorder.before_run(context)
        session.run(step, options=asked.options, run_metadata=metadata)
        for context, record in zip(contexts, (None, metadata)):
            recorder.after_run(context, tf.estimator.SessionRunValues(None, None, record))
    facts = json.loads((tmp_path / "trace.json").read_text())["npu_bridge"]
    assert [step["step"] for step in facts["steps"]] == [1]


def test_of_a_loop_the_last_step_is_recorded(graph, tmp_path):
    assert train_twice(graph, StepRecorder(range(3, 6), str(tmp_path / "trace.json"), rank=0), loop=4) == 8
    (step,) = json.loads((tmp_path / "trace.json").read_text())["npu_bridge"]["steps"]
    assert step["step"] == 3 and step["updates"]


def test_a_range_between_the_last_steps_of_loops_is_told_which_steps_there_are(graph, tmp_path):
    recording = Recording(4, 6, str(tmp_path))
    train_twice(graph, StepRecorder(recording.steps, recording.path_of(0), rank=0), loop=4)
    said = recording.draw_tail(1)
    assert said.startswith("timeline: nothing was recorded of steps 4-5. Only the last step of a run of 4 steps")
    assert "got steps 3 to 7 at intervals of 4" in said and "--timeline 7:8" in said


def test_options_of_the_script_are_kept(graph, tmp_path):
    train = minimized()
    watch = TrainingHookEngine([StepRecorder(range(0, 1), str(tmp_path / "trace.json"), rank=0)])
    options = tf1.RunOptions(timeout_in_ms=60_000, report_tensor_allocations_upon_oom=True)
    with tf1.Session(graph=graph) as session:
        session.run(tf1.global_variables_initializer())
        metadata = tf1.RunMetadata()
        add_engine(session, watch)
        session.run(train, options=options, run_metadata=metadata)
    assert options == tf1.RunOptions(timeout_in_ms=60_000, report_tensor_allocations_upon_oom=True)
    assert metadata.step_stats.dev_stats


def test_a_restart_beyond_the_steps_keeps_what_was_recorded(graph, record, tmp_path):
    step = tf1.train.get_or_create_global_step()
    runs = [tf1.assign(step, 50), tf1.assign_add(step, 1)]
    assert record(range(50, 51), *runs) == ([50], 50)
    assert record(range(60, 61), *runs) == ([50], 50)


def test_a_later_session_is_recorded_by_its_global_step(graph, tmp_path):
    watch = TrainingHookEngine([StepRecorder(range(4, 5), str(tmp_path / "trace.json"), rank=0)])
    step = tf1.train.get_or_create_global_step()
    train = tf1.assign_add(step, 1)
    for begin in (0, 4):
        with tf1.Session(graph=graph) as session:
            step.load(begin, session)
            add_engine(session, watch)
            session.run(train)
    facts = json.loads((tmp_path / "trace.json").read_text())["npu_bridge"]
    assert [step["step"] for step in facts["steps"]] == [4] and facts["first_step_seen"] == 0


def test_what_cannot_be_written_does_not_end_the_training(graph, tmp_path, caplog):
    (tmp_path / "file").touch()
    assert train_twice(graph, StepRecorder(range(0, 1), str(tmp_path / "file" / "trace.json"), rank=3)) == 2
    assert caplog.text.count("the timeline of rank 3 in") == caplog.text.count("is not written any more") == 1
