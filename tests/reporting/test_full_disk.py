"""A training whose reports, numbers, dumps and traces go to a disk that is full for some steps."""

from __future__ import annotations

import csv
import json

import tensorflow as tf

from npu_bridge.base.secondary_files import GrowingFile, NonFatalOutput
from npu_bridge.base.session_wrapper import add_engine
from npu_bridge.options import read_session_config
from npu_bridge.reporting import CsvWriter, History, HistoryHook, MetricsHook, ReportHook, TensorBoardHook
from npu_bridge.reporting.step_recorder import StepRecorder
from npu_bridge.session.dump_hook import DumpHook
from npu_bridge.session.hooked_session import TrainingHookEngine
from npu_bridge.session.profiling import ProfilingHook
from npu_run.compare.events import read_scalars
from npu_run.trials.record import RecordStepsHook
from tests.reporting.stepping import Clock, run_steps
from tests.session.models import session_config
from tests.small_disk import small_disk  # noqa: F401 - a fixture

STEPS, FULL_FROM, ROOM_FROM = 9, 2, 6


class FailingWriter:
    """A user's own writer, to a server that is unreachable for a while."""

    failures = (KeyError,)

    def __init__(self):
        self.steps, self.is_gone = [], False

    def begin(self, step):
        if self.is_gone:
            raise KeyError("no such run")

    def write(self, step, values, precision):
        if self.is_gone:
            raise KeyError("no such server")
        self.steps.append(step)

    def close(self):
        pass


def test_training_goes_on_and_writes_again_when_there_is_room(tmp_path, small_disk, caplog, monkeypatch):  # noqa: F811
    monkeypatch.setattr("npu_bridge.base.secondary_files._PAUSE_SECS", 0.0)
    monkeypatch.setattr("npu_bridge.base.secondary_files._LONGEST_PAUSE_SECS", 0.0)
    (small_disk.path / "dump").mkdir()
    disk, writer, done = small_disk.path, FailingWriter(), []
    options = read_session_config(session_config(enable_dump=True, dump_path=str(disk / "dump"), dump_mode="output"))
    hooks = [
        HistoryHook(str(disk / "history" / "history.jsonl")),
        MetricsHook(CsvWriter(str(disk / "numbers" / "numbers.csv")), every_n_steps=1, clock=Clock(per_look=9.0)),
        MetricsHook(writer, every_n_steps=1, clock=Clock(per_look=9.0)),
        TensorBoardHook(str(disk / "events"), every_n_steps=1, clock=Clock(per_look=9.0)),
        # TensorFlow's own, which share the writer, and of which Estimators have several.
        tf.compat.v1.train.StepCounterHook(every_n_steps=1, output_dir=str(disk / "events")),
        ReportHook(str(disk / "run")),
        DumpHook(options, "graph"),
    ]

    def between(number):
        done.append(number)
        writer.is_gone = FULL_FROM <= number + 1 < ROOM_FROM
        if number + 1 == FULL_FROM:
            for path in (disk / "history" / "history.jsonl", disk / "numbers" / "numbers.csv"):
                with open(path, "a") as file:  # the last block of a file still has room when a disk is full
                    file.write("\n" * (4096 - path.stat().st_size % 4096))
            small_disk.fill()
        if number + 1 == ROOM_FROM:
            small_disk.make_room()

    with caplog.at_level("WARNING", logger="npu_bridge"):
        run_steps(hooks, [float(STEPS - number) for number in range(STEPS)], between=between)
    assert len(done) == STEPS
    said = [record.getMessage() for record in caplog.records if record.name.startswith("npu_bridge")]
    files = ("the history", "the file of numbers", "the file of events in", "the dump")
    for what in (*files, "the output of FailingWriter"):
        stopped = [text for text in said if text.startswith(what) and "is not written any more: " in text]
        again = [text for text in said if text.startswith(what) and text.endswith(" is written again")]
        assert (len(stopped), len(again)) == (1, 1), (what, said)
    assert [row.step for row in History(str(disk / "history" / "history.jsonl")).rows] == list(range(1, STEPS + 1))
    with open(disk / "numbers" / "numbers.csv", newline="") as file:
        assert [row["step"] for row in csv.DictReader(file)] == list(map(str, range(1, STEPS + 1)))
    assert writer.steps == [1, 2, 7, 8, 9]
    steps = read_scalars(str(disk / "events"))["loss"]
    assert set(steps) == {1, 2, 7, 8, 9}
    dumped = {json.loads(path.read_text())["step"] for path in (disk / "dump").glob("*/0/graph/*/*/index.json")}
    assert dumped >= {0, 1, 6, 7, 8} and not list(disk.rglob(".unfinished-*"))
    assert "report.html" in {path.name for path in (disk / "run").iterdir()}


def test_what_is_written_at_the_end_ends_nothing(small_disk, caplog):  # noqa: F811
    disk = small_disk.path
    small_disk.fill()
    steps = run_with(
        RecordStepsHook(str(disk / "record"), 2, 0), StepRecorder(range(0, 2), str(disk / "t" / "x.json"), 0)
    )
    options = read_session_config(
        session_config(profiling_mode=True, profiling_options=json.dumps({"output": str(disk / "trace")}))
    )
    with caplog.at_level("WARNING", logger="npu_bridge"):
        run_steps([ProfilingHook(options), ReportHook(str(disk / "run"))], [2.0, 1.0])
    assert steps == 3
    for what in ("the record in", "the timeline of rank 0 in", "the trace of", "the page of", "the history"):
        assert sum(text.startswith(what) for text in caplog.messages) == 1, (what, caplog.messages)


def run_with(*hooks):
    """Three training steps of a bare session; gives the global step then."""
    with tf.Graph().as_default():
        step = tf.compat.v1.train.get_or_create_global_step()
        weight = tf.compat.v1.get_variable("weight", [])
        train = tf.compat.v1.train.GradientDescentOptimizer(0.1).minimize(weight**2, global_step=step)
        with tf.compat.v1.Session() as session:
            session.run(tf.compat.v1.global_variables_initializer())
            add_engine(session, TrainingHookEngine(list(hooks)))
            for _ in range(3):
                session.run(train)
            return int(session.run(step))


def test_what_could_not_be_written_is_tried_once_more_at_the_end(tmp_path):
    folder = tmp_path / "folder"
    folder.touch()
    file = GrowingFile(folder / "log.txt", "the log", say=lambda line: None, clock=lambda: 0.0)
    file.write(b"first\n")
    folder.unlink()
    file.close()
    assert (folder / "log.txt").read_text() == "first\n"


def test_the_pauses_between_two_tries_grow_while_writes_fail():
    now, tries = 0.0, []

    def write():
        tries.append(now)
        raise OSError

    output = NonFatalOutput("the log", say=lambda line: None, clock=lambda: now)
    while now < 100:
        output.attempt(write)
        now += 1
    assert tries == [0, 1, 3, 7, 15, 31, 63]
