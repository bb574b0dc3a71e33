"""The operators and values of a run."""

from __future__ import annotations

import sys
import weakref

import pytest
import tensorflow as tf

from npu_bridge.graph import run as graph_run
from npu_bridge.graph.run import run_of
from npu_bridge.reporting.step_hook import StepHook
from tests.garbage import collect_garbage
from tests.session.models import FEATURES, LABELS, build
from tests.session.precision.small_models import classic_loops

tf1 = tf.compat.v1


def test_what_is_fed_is_not_computed(graph):
    first = tf.constant(1.0, name="first")
    tf.exp(first, name="not_fetched")
    second = tf.negative(first, name="second")
    third = tf.negative(second, name="third")
    run = run_of(graph, [third], {second: 5.0})
    assert [op.name for op in run.ops] == ["third"]
    assert run.values == {"second:0", "third:0"}


@pytest.mark.parametrize("is_classic", [False, True])
def test_everything_that_can_be_looked_at_can_be_fetched(graph, is_classic):
    with classic_loops(is_classic):
        loss, train_op = build(tf1.placeholder(tf.float32, [None, 4], "x"), tf.constant(LABELS))
    run = run_of(graph, {"a": [train_op], "b": loss}, {"x:0": FEATURES})
    assert run.name == "update"
    assert {"project:0", "activate:0", "mean_loss:0", "x:0"} <= run.values
    assert any(op.type == ("Switch" if is_classic else "StatelessIf") for op in run.ops)
    with tf1.Session() as session:
        session.run(tf1.global_variables_initializer())
        session.run([train_op, sorted(run.values)], {"x:0": FEATURES})


def test_a_graph_that_lost_its_control_flow_contexts_is_read_from_its_operators():
    with tf.Graph().as_default() as original, classic_loops():
        x = tf1.placeholder(tf.float32, [], "x")
        looped = tf.while_loop(lambda i, y: i < 3, lambda i, y: (i + 1, tf.negative(y)), (0, x))[1]
        result = tf.cond(looped > 0, lambda: looped * 2.0, lambda: tf.exp(looped), name="chosen").name
        definition = original.as_graph_def()
    with tf.Graph().as_default() as imported:
        tf.import_graph_def(definition, name="")
        run = run_of(imported, result, {"x:0": 1.0})
        with tf1.Session() as session:
            values = session.run(sorted(run.values), {"x:0": 3.0})
        assert "while/Exit_1:0" in run.values
        assert not any("Negative" in name or "/mul" in name for name in run.values)
        assert -3.0 in [float(value) for value in values]


def test_runs_with_the_same_updates_have_the_same_purpose(graph):
    loss, train_op = build(tf.constant(FEATURES), tf.constant(LABELS))
    step = tf1.train.get_global_step()
    assert run_of(graph, train_op).purpose == run_of(graph, {"x": [loss, train_op], "hook": step}).purpose
    assert run_of(graph, loss).purpose == {"mean_loss:0"} != run_of(graph, step).purpose
    assert run_of(graph, tf1.global_variables_initializer()).purpose != run_of(graph, train_op).purpose


def test_no_text_resource_or_reference_is_looked_at(graph):
    variable = tf1.get_variable("v", [1], use_resource=False)
    resource = tf1.get_variable("w", [1], use_resource=True)
    text = tf.strings.as_string(resource + variable, name="text")
    run = run_of(graph, text)
    assert not run.values & {"v:0", "w:0", "text:0"}
    assert "v/read:0" in run.values


def test_a_run_is_read_once_until_the_graph_grows_and_ends_with_the_graph():
    with tf.Graph().as_default() as graph:
        value = tf.constant(1.0, name="value")
        run = run_of(graph, {"a": value})
        assert run_of(graph, "value:0") is run
        assert run_of(graph, value, {value: 2.0}) is not run
        tf.constant(2.0)
        assert run_of(graph, value) is not run
        assert run_of(graph, value).ops == (value.op,)
    gone = weakref.ref(graph)
    del graph, value, run
    collect_garbage()
    assert gone() is None


def test_a_run_is_found_while_another_thread_sees_the_graph_grow(graph):
    one, two = tf.constant(1.0), tf.constant(2.0)

    def let_other_thread_run(frame, event, argument):
        if frame.f_code is run_of.__code__:
            sys.settrace(None)
            tf.constant(3.0)
            run_of(graph, two)
            sys.settrace(let_other_thread_run)
            return let_other_thread_run  # before each line

    before = sys.gettrace()
    sys.settrace(let_other_thread_run)
    try:
        found = run_of(graph, one)
    finally:
        sys.settrace(before)
    assert found.requested_elements == [one]


class CountingHook(StepHook):
    steps = 0

    def on_step(self, session, observation):
        self.steps += 1


def test_hooks_share_one_look_at_a_run_and_tell_runs_apart_that_overlap(graph, monkeypatch):
    """As with a thread that evaluates in the session of a training."""
    loss, train_op = build(tf.constant(FEATURES), tf.constant(LABELS))
    hooks, looks, look = [CountingHook(), CountingHook()], [], run_of
    monkeypatch.setattr(graph_run, "run_of", lambda *asked: looks.append(asked) or look(*asked))
    with tf1.Session() as session:
        session.run(tf1.global_variables_initializer())
        contexts = [
            tf.estimator.SessionRunContext(tf.estimator.SessionRunArgs(asked), session) for asked in (train_op, loss)
        ]
        for hook in hooks:
            hook.begin()
            hook.after_create_session(session, None)
        asked = [hook.before_run(context) for context in contexts for hook in hooks]
        values = tf.estimator.SessionRunValues(session.run(asked[0].fetches if asked[0] else {}), None, None)
        for context in contexts[::-1]:
            for hook in hooks:
                hook.after_run(context, values)
    assert [hook.steps for hook in hooks] == [1, 1] and len(looks) == 2
