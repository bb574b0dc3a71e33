"""`StopHook`: a session that is asked to end ends all its hooks, and then the process."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
import time

import pytest
import tensorflow as tf

from npu_bridge.session import StopHook
from npu_bridge.session.elastic import stop_hook
from npu_bridge.session.elastic.stop_request import STOPPED_EXIT_CODE, StopRequest
from npu_bridge.session.stop_together import StopTogether
from tests.garbage import collect_garbage
from tests.goldens.counting_estimator import estimator_of, input_fn


@pytest.fixture(autouse=True)
def no_handler():
    """Frees the signal: a training of another case that failed handles it until its callback is collected."""
    collect_garbage()
    before = signal.signal(signal.SIGTERM, signal.SIG_DFL)
    yield
    signal.signal(signal.SIGTERM, before)


def test_train_and_evaluate_ends_without_another_evaluation(tmp_path, monkeypatch):
    request, evaluated = StopRequest(), []
    monkeypatch.setattr(stop_hook, "stop_request_of_process", lambda: request)

    class Asks(tf.estimator.SessionRunHook):
        def after_create_session(self, session, coord):
            request.allow_runs_until(3)

    estimator = estimator_of(tmp_path, save_checkpoints_steps=50)
    train = tf.estimator.TrainSpec(input_fn, max_steps=100, hooks=[Asks()])
    evaluation = tf.estimator.EvalSpec(lambda: [evaluated.append(1), input_fn()][1], steps=1)
    with pytest.raises(SystemExit) as left:
        tf.estimator.train_and_evaluate(estimator, train, evaluation)
    assert (left.value.code, evaluated) == (STOPPED_EXIT_CODE, [])
    assert estimator.get_variable_value("global_step") == 3


def test_hooks_behind_it_end_before_the_process_does(graph, tmp_path, monkeypatch):
    request = StopRequest()
    monkeypatch.setattr(stop_hook, "stop_request_of_process", lambda: request)
    weight = tf.compat.v1.get_variable("weight", [])
    step = tf.compat.v1.train.get_or_create_global_step()
    train = tf.compat.v1.train.GradientDescentOptimizer(0.1).minimize(weight * weight, step)
    saver = tf.estimator.CheckpointSaverHook(str(tmp_path), save_steps=1000)
    with pytest.raises(SystemExit) as left:
        with tf.compat.v1.train.MonitoredSession(hooks=[StopHook(), saver]) as session:
            request.allow_runs_until(3)
            while not session.should_stop():
                session.run(train)
    assert left.value.code == STOPPED_EXIT_CODE
    assert tf.train.latest_checkpoint(str(tmp_path)) == str(tmp_path / "model.ckpt-3")


def test_a_training_that_has_failed_takes_no_signals_from_the_next_one():
    request = StopRequest()
    failed, begun = contextlib.ExitStack(), contextlib.ExitStack()
    failed.enter_context(request.handle_requests(1))
    begun.enter_context(request.handle_requests(1))
    failed.close()
    assert signal.getsignal(signal.SIGTERM) is not signal.SIG_DFL
    os.kill(os.getpid(), signal.SIGTERM)
    assert request.is_due
    begun.close()
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL


def test_a_training_that_ends_leaves_the_scripts_own_handler_in_place():
    request, own = StopRequest(), lambda number, frame: None
    with request.handle_requests(1):
        signal.signal(signal.SIGTERM, own)
    assert signal.getsignal(signal.SIGTERM) is own
    signal.signal(signal.SIGTERM, signal.SIG_DFL)


def test_a_training_that_ends_in_another_thread_leaves_the_handler_to_the_next_one():
    """Python can collect the hook of a failed training in any thread, which may not set handlers."""
    request, failed, sent = StopRequest(), contextlib.ExitStack(), []
    request.connect_launcher(sent.append)
    failed.enter_context(request.handle_requests(1))
    collector = threading.Thread(target=failed.close)
    collector.start()
    collector.join()
    with request.handle_requests(1):
        os.kill(os.getpid(), signal.SIGTERM)
    handles, does_not = {"can_stop_after_step": True}, {"can_stop_after_step": False}
    assert sent == [handles, does_not, handles, {"received_signal": "SIGTERM"}, does_not]


def test_the_launcher_is_told_last_of_the_training_that_goes_on():
    """The one before is collected in another thread just as this one begins."""
    request, failed, sent, is_collected = StopRequest(), contextlib.ExitStack(), [], threading.Event()
    collector = threading.Thread(target=failed.close)

    def send(message):
        if threading.current_thread() is collector:
            is_collected.set()
            time.sleep(0.2)
        sent.append(message["can_stop_after_step"])

    request.connect_launcher(send)
    failed.enter_context(request.handle_requests(1))
    collector.start()
    is_collected.wait(20)
    with request.handle_requests(1):
        collector.join()
        assert sent == [True, False, True]


def test_ranks_that_train_in_two_threads_cannot_end_after_the_same_step():
    request, sent = StopRequest(), []
    request.connect_launcher(sent.append)
    with request.handle_requests(2):
        for _ in range(2):
            request.begin_run()
            other = threading.Thread(target=request.begin_run)
            other.start()
            other.join()
        assert sent == [{"can_stop_after_step": True}, {"can_stop_after_step": False}]


def test_a_second_training_begins_anew():
    hook = StopHook()
    hook.was_stopped, hook.step = True, 3
    hook.begin()
    hook.close()
    assert (hook.was_stopped, hook.step) == (False, None)


class StopAtSecondRun(tf.estimator.SessionRunHook):
    def begin(self):
        self.runs = 0

    def after_run(self, context, values):
        self.runs += 1
        if self.runs == 2:
            context.request_stop()


def test_a_hook_ends_a_second_training_as_well():
    hook, runs = StopTogether([StopAtSecondRun()]), [0, 0]
    for training in range(2):
        with tf.Graph().as_default():
            train = tf.compat.v1.assign_add(tf.compat.v1.train.get_or_create_global_step(), 1)
            with tf.compat.v1.train.MonitoredSession(hooks=[hook]) as session:
                while not session.should_stop() and runs[training] < 5:
                    session.run(train)
                    runs[training] += 1
    assert (runs, hook.step) == ([2, 2], 2)
