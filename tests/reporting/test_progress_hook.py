"""The lines and counts of `ProgressHook`, with a clock that the test sets."""

from __future__ import annotations

import io
import math
import types

import pytest
import tensorflow as tf

from npu_bridge import collective
from npu_bridge.reporting import ProgressHook, progress_hook
from npu_bridge.reporting.progress_hook import StepRate
from tests.reporting.stepping import Clock, build_steps, run_steps


class Terminal(io.StringIO):
    def isatty(self):
        return True


def lines_of(losses, skipped=None, scales=None, *, clock=None, between=None, **options):
    """The lines of a training's hook, which is made with these options, and the hook."""
    out = io.StringIO()
    hook = ProgressHook(stream=out, clock=clock or Clock(), **options)
    run_steps([hook], losses, skipped, scales, between)
    return out.getvalue().splitlines(), hook


def test_plain_lines():
    options = {"total_steps": 4, "every_n_steps": 2, "clock": Clock(per_look=0.5)}
    lines, _ = lines_of([8.0, 7.0, 6.0, 5.0], [False] * 4, [1024.0] * 4, **options)
    assert lines == [
        "step 1/4 (25 %) | loss 8.0000 | loss scale 2^10 | skipped 0 steps",
        "step 3/4 (75 %) | loss 6.0000 | loss scale 2^10 | skipped 0 steps",
        "step 4/4 (100 %) | loss 5.0000 | loss scale 2^10 | skipped 0 steps | 2.00 steps/s | ETA 0 s",
    ]


def test_terminal_rewrites_one_line_and_notes_stay():
    out = Terminal()
    hook = ProgressHook(total_steps=3, stream=out, clock=Clock(per_look=1.0))
    run_steps([hook], [8.0, 8.0, 7.0, 6.0], [False, True, False, False], [4.0] * 4)
    text = out.getvalue()
    assert text.count("\n") == 2  # the note, and the end
    assert text.count("\r") == 5  # four steps and the note
    assert text.endswith("\x1b[K\n")


def test_terminal_is_not_redrawn_faster_than_one_can_read():
    out = Terminal()
    hook = ProgressHook(stream=out, clock=Clock(per_look=0.03))
    run_steps([hook], [1.0] * 9)
    assert out.getvalue().count("\r") == 3  # steps 1, 5 and 9, 0.12 s apart; the end shows nothing new
    assert "step 9 |" in out.getvalue()


def test_plain_lines_come_at_least_every_half_minute():
    clock = Clock()

    def wait(number):
        clock.now += 11.0

    lines, _ = lines_of([1.0] * 7, total_steps=100000, clock=clock, between=wait)
    assert [line.split("/")[0] for line in lines] == ["step 1", "step 4", "step 7"]


def test_counters_are_readable():
    skipped, scales = [False, True, False, False], [4.0, 4.0, 2.0, 2.0]
    _, hook = lines_of([8.0, 7.0, 6.0, 5.0], skipped, scales, clock=Clock(per_look=0.25))
    assert (hook.last_loss, hook.loss_scale) == (5.0, 2.0)
    assert (hook.step, hook.skipped_steps) == (3, 1)


def test_nan_loss_is_shown_as_it_is():
    lines, hook = lines_of([math.nan])
    assert lines == ["step 1 | loss nan"]
    assert math.isnan(hook.last_loss)


@pytest.mark.parametrize("losses, line", [([], "step 1"), ([2.5, 1.0], "step 1 | loss 2.5000")])
def test_without_an_optimizer_of_ours_the_first_listed_loss_is_shown_if_there_is_one(losses, line):
    out = io.StringIO()
    hook = ProgressHook(stream=out, clock=Clock())
    with tf.Graph().as_default():
        for loss in losses:
            tf.compat.v1.losses.add_loss(tf.constant(loss))
        train_op = tf.compat.v1.assign_add(tf.compat.v1.train.get_or_create_global_step(), 1)
        with tf.compat.v1.train.MonitoredSession(hooks=[hook]) as session:
            session.run(train_op)
    assert out.getvalue().splitlines() == [line] and hook.last_loss == (losses[0] if losses else None)


def test_loss_by_name():
    _, hook = lines_of([3.0], loss="the_loss")
    assert hook.last_loss == 3.0
    with pytest.raises(ValueError, match=r"'no_such_loss'.*tf.identity"):
        lines_of([3.0], loss="no_such_loss")


def test_one_hook_serves_two_graphs():
    _, hook = lines_of([8.0, 8.0], [True, False], [4.0] * 2)
    run_steps([hook], [5.0], [False], [4.0])
    assert (hook.last_loss, hook.skipped_steps, hook.step) == (5.0, 0, 1)


def test_other_ranks_count_but_stay_silent(monkeypatch):
    monkeypatch.setattr(collective, "current", lambda: types.SimpleNamespace(rank=1, size=2))
    lines, hook = lines_of([8.0, 7.0], [True, False], [4.0] * 2)
    assert lines == []
    assert (hook.skipped_steps, hook.last_loss) == (1, 7.0)


def test_recent_pace_forgets_what_is_outside_its_window():
    pace = StepRate(window=2)
    for steps, now in [(0, 0.0), (10, 10.0), (20, 11.0), (40, 12.0)]:
        pace.record_steps(steps, now)
    assert pace.recent_rate == 15.0


def test_samples_per_second_are_right_after_a_loop_has_skipped_steps_unseen(monkeypatch):
    monkeypatch.setattr(progress_hook, "steps_per_run", lambda session: 10)
    monkeypatch.setattr(ProgressHook, "samples_per_step", 4)
    out = io.StringIO()
    hook = ProgressHook(every_n_steps=1, stream=out, clock=Clock(per_look=10.0))
    with tf.Graph().as_default():
        train_op = build_steps([1.0] * 6)
        nine_more = tf.compat.v1.assign_add(tf.compat.v1.train.get_global_step(), 9)
        with tf.compat.v1.train.MonitoredSession(hooks=[hook]) as session:
            for number in range(6):
                session.run([train_op, *([nine_more] if number > 2 else [])])  # the first loops skip nine of ten steps
    assert out.getvalue().splitlines()[-1].endswith("| 1.00 steps/s | 4.00 samples/s")
