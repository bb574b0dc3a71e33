"""A training that an error stops has its report, with the error in it; the error goes its way."""

from __future__ import annotations

import json
import os
import pathlib
import signal

import numpy as np
import pytest
import tensorflow as tf

from npu_bridge import collective
from npu_bridge.reporting import History, ReportCallback, ReportHook
from npu_bridge.reporting.failure_hook import FailureHook
from npu_bridge.reporting.page import describe_failure, note_failure, write_page
from npu_bridge.session.precision import AccelerateTrainCallback
from tests.garbage import collect_garbage
from tests.npu_run.launching import wait_for
from tests.reporting.stepping import run_steps

LOSSES = [3.0, 2.0, 1.5, 1.25, 1.125]


def failing(error, at=2):
    def between(number):
        if number == at:
            if error is KeyboardInterrupt:
                os.kill(os.getpid(), signal.SIGINT)
            raise error("a <b> that is planted")

    return between


def report_of(folder):
    return json.loads((folder / "report.json").read_text()).get("failure"), (folder / "report.html").read_text()


def test_an_error_is_in_the_report_with_the_persons_own_frames(tmp_path, capsys):
    with pytest.raises(ValueError, match="planted"):
        run_steps([ReportHook(str(tmp_path))], LOSSES, between=failing(ValueError))
    failure, page = report_of(tmp_path)
    told = [failure[name] for name in ("type", "message", "step", "rank")]
    assert told == ["ValueError", "a <b> that is planted", 3, 0]
    assert [frame[2] for frame in failure["frames"]][-2:] == ["run_steps", "between"]
    assert not [frame for frame in failure["frames"] if "site-packages" in frame[0] or "npu_bridge/" in frame[0]]
    assert "3 steps, stopped by ValueError</h1>" in page and "Stopped by ValueError at step 3</h2>" in page
    assert "a &lt;b&gt; that is planted" in page and "test_failure_hook.py" in page and 'data-last-step="3"' in page
    assert [row.step for row in History(str(tmp_path / "history.jsonl")).rows] == [1, 2, 3]
    assert capsys.readouterr().out == f"report, with the error: file://{tmp_path}/report.html\n"


def test_ctrl_c_is_an_interruption(tmp_path):
    with pytest.raises(KeyboardInterrupt):
        run_steps([ReportHook(str(tmp_path))], LOSSES, between=failing(KeyboardInterrupt))
    failure, page = report_of(tmp_path)
    assert failure["type"] == "KeyboardInterrupt" and "Interrupted at step 3</h2>" in page


def test_an_error_of_a_graph_in_the_first_step_names_its_operator(tmp_path):
    with tf.Graph().as_default(), pytest.raises(tf.errors.InvalidArgumentError):
        step = tf.compat.v1.train.get_or_create_global_step()
        division = 1 // tf.compat.v1.placeholder_with_default(0, [], "zero")
        with tf.compat.v1.train.MonitoredSession(hooks=[ReportHook(str(tmp_path))]) as session:
            session.run([division, step])
    failure, page = report_of(tmp_path)
    assert failure["message"] == "Integer division by zero" and failure["made"].startswith(f"{__file__}:")
    assert "Stopped by InvalidArgumentError in the first step" in page and "<svg" not in page
    assert "The script makes the operator floordiv at" in page


def test_a_training_that_comes_to_its_end_has_none_and_the_next_one_forgets(tmp_path):
    hooks = [ReportHook(str(tmp_path))]
    with pytest.raises(SystemExit):
        run_steps(hooks, LOSSES, between=failing(SystemExit))
    assert "stopped by SystemExit" in report_of(tmp_path)[1]
    with pytest.raises(SystemExit):  # a `StopHook` ends the process so, which then resumes
        run_steps([ReportHook(str(tmp_path))], LOSSES, between=failing(lambda text: SystemExit(75)))
    assert report_of(tmp_path)[0] is None
    for end in (StopIteration, lambda text: tf.errors.OutOfRangeError(None, None, text)):
        run_steps([ReportHook(str(tmp_path))], LOSSES, between=failing(end))
        assert report_of(tmp_path)[0] is None
    try:
        raise OSError("that a script handles while it trains again")
    except OSError:
        run_steps([ReportHook(str(tmp_path))], LOSSES)
    assert report_of(tmp_path)[0] is None and "stopped" not in report_of(tmp_path)[1]


def test_an_error_that_a_script_handles_while_a_session_is_freed_is_not_that_of_its_training(tmp_path):
    with tf.Graph().as_default():
        step = tf.compat.v1.train.get_or_create_global_step().assign_add(1)
        session = tf.compat.v1.train.MonitoredTrainingSession(hooks=[ReportHook(str(tmp_path))])
        session.run(step)
    try:
        raise KeyError("of other code")
    except KeyError:
        del session
        collect_garbage()
    assert json.loads((tmp_path / "report.json").read_text()).get("failure") is None


def test_a_report_that_cannot_be_made_hides_no_error(tmp_path, caplog):
    (tmp_path / "report.html").mkdir()
    with caplog.at_level("WARNING", logger="npu_bridge"), pytest.raises(ValueError, match="planted"):
        run_steps([ReportHook(str(tmp_path))], LOSSES, between=failing(ValueError))
    assert [record.getMessage()[:23] for record in caplog.records] == ["the report of the error"]


@pytest.mark.parametrize("place", [0, 1])
def test_keras_has_it_too(tmp_path, place, monkeypatch):
    """Before and after another callback that changes the train function."""
    for name in ("TOTAL_STEP", "STEP_NOW"):  # which this callback writes
        monkeypatch.setenv(name, "0")

    def shapes():
        yield np.ones([4, 2], np.float32), np.ones([4, 1], np.float32)
        raise ValueError("a <record> that is planted")

    kind = (tf.TensorSpec([None, 2]), tf.TensorSpec([None, 1]))
    data = tf.data.Dataset.from_generator(shapes, output_signature=kind)
    model = tf.keras.Sequential([tf.keras.layers.Input([2]), tf.keras.layers.Dense(1)])
    model.compile("sgd", "mse")
    original = model.make_train_function()
    callbacks = [AccelerateTrainCallback("fast|step", total_step=9)]
    callbacks.insert(place, ReportCallback(str(tmp_path)))
    with pytest.raises(tf.errors.InvalidArgumentError):
        model.fit(data, verbose=0, callbacks=callbacks)
    failure, page = report_of(tmp_path)
    assert failure["step"] == 1 and failure["frames"][-1][2] == "shapes"
    assert failure["message"] == "ValueError: a <record> that is planted" and 'data-last-step="1"' in page
    assert "ValueError: a &lt;record&gt; that is planted" in page and "<record>" not in page.partition("<script")[0]
    model.fit(data.take(1), verbose=0, callbacks=callbacks)
    assert report_of(tmp_path)[0] is None and model.train_function is original


def test_an_error_about_a_rank_that_is_gone_says_so(tmp_path):
    lost = "[/gloo/transport/tcp/pair.cc:547] Read error [127.0.0.1]:80: Connection reset by peer"
    with pytest.raises(tf.errors.UnknownError):
        run_steps(
            [ReportHook(str(tmp_path))], LOSSES, between=failing(lambda text: tf.errors.UnknownError(None, None, lost))
        )
    assert report_of(tmp_path)[0]["secondary"] and "Another rank has ended before" in report_of(tmp_path)[1]


def test_the_first_error_with_a_cause_of_its_own_stays(tmp_path):
    run_steps([ReportHook(str(tmp_path))], LOSSES)
    lost, own, late = (
        describe_failure(RuntimeError(text), 3, rank, rank == 0) for rank, text in enumerate(["lost", "own", "late"])
    )
    are_noted = [note_failure(str(tmp_path), each) for each in (lost, lost, own, late, lost)]
    assert are_noted == [True, False, True, False, False]
    assert "Stopped by RuntimeError at step 3" in (write_page(str(tmp_path)) and report_of(tmp_path)[1])
    assert not note_failure(str(tmp_path / "nowhere"), own)


def fail_on_rank_1(folder):
    """Rank 0 begins, and ends after rank 1 has failed in its third step."""
    rank, failed = collective.current().rank, os.path.join(folder, "failed")
    hooks = [ReportHook(folder)] if rank == 0 else [FailureHook(folder)]

    def meet(number):
        if rank == 0 and number == 3:
            wait_for(lambda: os.path.exists(failed), "the failure of rank 1")
        if rank == 1 and number == 2:
            wait_for(lambda: os.path.exists(os.path.join(folder, "report.json")), "the report of rank 0")
            raise ValueError("planted on rank 1")

    try:
        run_steps(hooks, LOSSES, between=meet)
    except ValueError as error:
        pathlib.Path(failed).touch()
        return str(error)
    return None


def test_another_rank_adds_its_error_to_the_report_of_rank_0(on_ranks, tmp_path):
    assert on_ranks(2, fail_on_rank_1, str(tmp_path)) == [None, "planted on rank 1"]
    failure, page = report_of(tmp_path)
    assert (failure["rank"], failure["step"]) == (1, 3) and failure["message"] == "planted on rank 1"
    assert "Stopped by ValueError at step 3 on rank 1</h2>" in page and 'data-last-step="5"' in page
