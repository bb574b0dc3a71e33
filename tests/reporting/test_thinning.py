"""Which steps of a long training are kept."""

from __future__ import annotations

from npu_bridge.reporting import Observation
from npu_bridge.reporting.thinning import HistoryThinner


def train(losses, skipped=(), step=0, steps_per_update=1):
    """The rows `(global step, loss)` kept of a training."""
    thinning, rows = HistoryThinner(step), []
    for number, loss in enumerate(losses):
        step += steps_per_update * (number not in skipped)
        thinning.add(Observation(loss, None, number in skipped), float(number), 1)
        if thinning.is_full:
            rows += thinning.pop_rows(step)
    rows += thinning.pop_rows(step, is_training_over=True)
    return [(step, seen.observation.loss) for step, seen in rows]


def test_ever_fewer_and_the_extremes():
    losses = [float(number) for number in range(7000, 0, -1)]
    losses[3500], losses[3501], losses[1700] = 9e9, -7.0, float("nan")
    rows = train(losses, skipped={2001})
    steps = [step for step, _ in rows]
    assert steps[:1000] == list(range(1, 1001)), "all of the first thousand"
    assert steps == sorted(steps) and steps[-1] == 6999 and 2000 < len(steps) < 3000
    found = dict(rows)
    assert found[3500] == 9e9 and found[3501] == -7.0, "extremes, at their own steps"
    assert found[1701] != found[1701], "a loss that is not a number"
    assert (2001, losses[2001]) in rows, "skipped steps, at the step they did not move"


def test_a_global_step_that_moves_otherwise_is_spread_evenly():
    assert [step for step, _ in train([1.0] * 4, step=100, steps_per_update=3)] == [103, 106, 109, 112]


def test_skipped_steps_do_not_move_the_step_that_is_not_read():
    thinning = HistoryThinner(0)
    for number in range(4):
        thinning.add(Observation(1.0, None, number == 1), float(number), 1)
    assert [step for step, _ in thinning.pop_rows(None)] == [1, 1, 2, 3]


def test_the_last_step_is_there_with_what_was_lowest_before_it():
    rows = train([5.0] * 1001 + [4.0, 9.0, 5.0, 6.0], step=0)
    assert rows[-4:] == [(999, 5.0), (1002, 4.0), (1003, 9.0), (1005, 6.0)]
