"""The history file: what is kept, what is dropped on resume, what a crash may leave behind."""

from __future__ import annotations

import json
import logging
import math
import os
import types

import numpy as np
import pytest

from npu_bridge import collective
from npu_bridge.reporting import History, HistoryHook
from npu_bridge.reporting import history as history_file
from npu_bridge.reporting.history import list_rows_and_starts
from tests.reporting.stepping import Clock, run_steps


@pytest.fixture
def path(tmp_path):
    return str(tmp_path / "run" / "history.jsonl")


def steps_of(history):
    return [(row.step, row.skipped) for row in history.rows]


def write(path, steps, start=0):
    history = History(path, Clock(100.0, per_look=1.0))
    history.begin_session(start, ranks=2)
    for step, skipped in steps:
        history.append(step, 8.0 - step, 4.0, skipped)
    history.close()
    return history


def test_lines_are_plain_json(path):
    write(path, [(1, False)])
    with open(path, encoding="utf-8") as lines:
        assert [json.loads(line) for line in lines] == [
            {"start": 0, "time": 101.0, "ranks": 2},
            {"step": 1, "loss": 7.0, "loss_scale": 4.0, "skipped": False, "time": 102.0},
        ]


def test_evaluations_and_facts_are_kept_beside_the_steps(path):
    history = write(path, [(1, False), (2, False)])
    history.append_evaluation(2, {"loss": np.float32(0.5), "global_step": 2, "picture": np.zeros(3)}, secs=0.25)
    history.begin_session(2)
    history.note_facts(2, samples_per_step=64, parameters=7)
    history.append(3, math.nan, 4.0, False)
    history.note_facts(3, memory_bytes={0: 10, 1: 11})
    history.append_evaluation(3, {"loss": math.inf}, "test", 12, 1.5)
    history.close()
    read = History(path)
    assert read.entries[:5] == history.entries[:5] and len(read.entries) == len(history.entries) == 9
    assert [evaluation[0:1] + evaluation[2:] for evaluation in read.evaluations] == [
        (2, {"loss": 0.5}, "", None, 0.25),
        (3, {"loss": math.inf}, "test", 12, 1.5),
    ]
    assert read.facts[2:] == (64, 7, {0: 10, 1: 11}, None)
    assert list_rows_and_starts(read)[1:] == ([1, 2, 3], [0, 2])
    read.begin_session(2)  # what belongs to a later step is done again
    assert [evaluation.step for evaluation in History(path).evaluations] == [2]
    assert History(path).facts[2:] == (64, 7, None, None) and steps_of(read) == [(1, False), (2, False)]


def test_facts_written_before_the_first_step_begin_a_history(path):
    history = History(path)
    os.makedirs(os.path.dirname(path))
    history.note_facts(3, parameters=7)
    history.begin_session(3)
    history.append(4, 1.0, None, False)
    history.close()
    assert History(path).facts.parameters == 7 and steps_of(History(path)) == [(4, False)]


def test_an_evaluation_that_a_script_has_added_stays_in_the_next_session(path):
    history = write(path, [(1, False), (2, False)])
    History(path).append_evaluation(2, {"loss": 0.5})
    history.begin_session(2)
    history.begin_session(2)
    history.close()
    assert [evaluation.metrics for evaluation in History(path).evaluations] == [{"loss": 0.5}]


def test_a_session_that_drops_nothing_adds_one_line_and_parses_no_step(path, monkeypatch):
    steps = [(step, False) for step in range(1, 51)]
    write(path, steps)
    history, number, parsed = History(path, Clock(900.0)), os.stat(path).st_ino, []
    History(path, Clock(800.0)).append_evaluation(50, {"loss": 1.0})
    size, parse = os.path.getsize(path), history_file._parse_line
    monkeypatch.setattr(history_file, "_parse_line", lambda line: parsed.append(line) or parse(line))
    history.begin_session(50)
    assert os.stat(path).st_ino == number and len(parsed) == len(history.evaluations) == 1
    assert os.path.getsize(path) == size + len('{"start": 50, "time": 900.0, "ranks": 1}\n')
    for lost in (5, 200, size):  # a part of a line, some lines, all lines: the whole file is written again
        history.close()
        os.truncate(path, max(0, os.path.getsize(path) - lost))
        history.begin_session(50)
        assert History(path).entries == history.entries and steps_of(history) == steps


def test_a_remote_folder_does_not_become_a_local_one(tmp_path, monkeypatch, caplog):
    monkeypatch.chdir(tmp_path)
    history = History("gs://bucket/run/history.jsonl")
    history.begin_session(0)
    history.append(1, 1.0, None, False)
    history.close()
    assert os.listdir(tmp_path) == [] and len(history.rows) == 1
    assert "gs://bucket/run is a remote folder" in caplog.text


def test_reading_creates_nothing(path, tmp_path):
    assert History(path).rows == []
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    "written, start, kept",
    [
        ([(1, False), (2, False), (3, False), (4, False)], 2, [(1, False), (2, False)]),
        ([(1, False), (1, True), (2, False), (2, True), (3, False)], 2, [(1, False), (1, True), (2, False)]),
        ([(1, False), (2, False)], 2, [(1, False), (2, False)]),
        ([(1, False), (11, False), (21, False)], 15, [(1, False), (11, False)]),
        ([(0, True), (1, False)], 0, []),
    ],
    ids=["a step", "a skipped step", "nothing", "between recorded steps", "an older run"],
)
def test_resume_drops_what_came_after_the_checkpoint(path, written, start, kept):
    write(path, written)
    history = History(path)
    assert history.count_skipped_steps_until(start) == sum(is_skipped for _, is_skipped in kept)
    history.begin_session(start)
    history.append(start + 1, 1.0, 4.0, False)
    history.close()
    assert steps_of(History(path)) == [*kept, (start + 1, False)]
    assert [each.step for each in History(path).starts] == ([0, start] if start else [0])


def test_half_written_last_line_is_left_out(path, caplog):
    write(path, [(1, False), (2, False)])
    with open(path, "a", encoding="utf-8") as file:
        file.write('{"step": 3, "lo')
    with caplog.at_level(logging.WARNING):
        history = History(path)
    assert steps_of(history) == [(1, False), (2, False)]
    assert not caplog.records
    history.begin_session(2)
    history.append(3, 1.0, 4.0, False)
    history.close()
    assert steps_of(History(path)) == [(1, False), (2, False), (3, False)]


def test_damaged_line_in_the_middle_is_left_out_with_a_warning(path, caplog):
    write(path, [(1, False)])
    with open(path, "a", encoding="utf-8") as file:
        file.write("what\n")
    assert steps_of(History(path)) == [(1, False)]
    assert "line 3" in caplog.text


@pytest.mark.parametrize("integer, number, truth", [(int, float, bool), (np.int64, np.float32, np.bool_)])
def test_not_a_number_survives_in_strict_json(path, integer, number, truth):
    history = History(path)
    history.begin_session(integer(0))
    history.append(integer(1), number(math.nan), number(math.inf), truth(True))  # as a session returns them
    history.append(2, None, None, False)
    history.close()
    with open(path, encoding="utf-8") as lines:
        assert "NaN" not in lines.read()
    first, second = History(path).rows
    assert math.isnan(first.loss) and first.loss_scale == math.inf
    assert second.loss is None and second.loss_scale is None


def test_rows_need_a_session(path):
    with pytest.raises(RuntimeError, match="begin_session"):
        History(path).append(1, 1.0, None, False)


def test_hook_can_be_sparse_but_never_misses_a_skipped_step(path):
    hook = HistoryHook(path, every_n_steps=3)
    run_steps([hook], [1.0] * 6, [False, False, True, False, False, False], [4.0] * 6)
    assert steps_of(History(path)) == [(1, False), (2, True), (3, False)]


def test_the_hook_can_thin_out_by_itself(path):
    """Rows come into the file with their own times and steps; the last ones at the end."""
    hook = HistoryHook(History(path, Clock(0.0, per_look=1.0)), every_n_steps=None)
    run_steps([hook], [8.0, 7.0, 6.0], [False, True, False], [4.0, 4.0, 2.0])
    assert [row[:5] for row in History(path).rows] == [
        (1, 8.0, 4.0, False, 2.0),
        (1, 7.0, 4.0, True, 3.0),
        (2, 6.0, 2.0, False, 4.0),
    ]


def test_other_ranks_write_nothing(path, monkeypatch, tmp_path):
    monkeypatch.setattr(collective, "current", lambda: types.SimpleNamespace(rank=1, size=2))
    run_steps([HistoryHook(path)], [1.0], [False], [4.0])
    assert list(tmp_path.iterdir()) == []
