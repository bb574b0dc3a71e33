"""`Summary`: the figures shown when a run has ended, such as steps, time and the last loss."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from typing import NamedTuple

from npu_bridge.base.files import write_whole
from npu_bridge.base.secondary_files import Secondary
from npu_bridge.reporting.history import History, laid_out
from npu_bridge.reporting.progress_line import format_count, format_loss, format_rate, format_scale, format_steps

# The last loss is a mean over this many steps: one batch alone says little (ours).
LAST_LOSS_STEPS = 10

# The first two steps of a session carry its start-up: TF prepares the graph for each new set of fetches.
_START_UP_STEPS = 2


class Summary(NamedTuple):
    """A run in seven numbers; None for what is not known.

    Attributes:
      ranks: processes that trained together, in the latest session.
      steps: global step reached.
      first_loss: loss of the very first recorded step, also after the run was resumed.
      last_loss: mean loss of the last ten recorded steps that were not skipped.
      skipped_steps: skipped steps of the whole run.
      loss_scale: the factor the latest step used; None without loss scaling.
      steps_per_sec: steps tried per second in the latest session that did any, start-up left out.
    """

    ranks: int
    steps: int
    first_loss: float | None
    last_loss: float | None
    skipped_steps: int
    loss_scale: float | None
    steps_per_sec: float | None


def summarize(history: History) -> Summary:
    """Draws the summary from a history, whatever number of sessions it holds."""
    rows = history.rows
    losses = [row.loss for row in rows if row.loss is not None]
    applied = [row.loss for row in rows if row.loss is not None and not row.skipped]
    last = (applied or losses)[-LAST_LOSS_STEPS:]
    return Summary(
        ranks=history.starts[-1].ranks if history.starts else 1,
        steps=rows[-1].step if rows else 0,
        first_loss=losses[0] if losses else None,
        last_loss=_mean(last) if last else None,
        skipped_steps=history.skipped_steps,
        loss_scale=rows[-1].loss_scale if rows else None,
        steps_per_sec=_steps_per_sec(history),
    )


def write_summary(summary: Summary, path: str) -> None:
    """Writes the summary as a JSON object with the names above; it appears complete or not at all.

    A number that is not finite is written as null: JSON has no NaN. Where it cannot be written, a warning says why.
    """
    fields = {name: _finite(value) for name, value in summary._asdict().items()}
    Secondary(f"the summary {path}").attempt(write_whole, path, json.dumps(fields, indent=2) + "\n")


def format_summary(summary: Summary) -> str:
    """The summary in one sentence for people."""
    parts = [f"trained {format_steps(summary.steps)} on {format_count(summary.ranks, 'rank')}"]
    if summary.first_loss is not None and summary.last_loss is not None:
        parts.append(f"loss {format_loss(summary.first_loss)} -> {format_loss(summary.last_loss)}")
    parts.append(f"skipped {format_steps(summary.skipped_steps)}")
    if summary.loss_scale is not None:
        parts.append(f"loss scale {format_scale(summary.loss_scale)}")
    if summary.steps_per_sec:
        parts.append(f"{format_rate(summary.steps_per_sec)} steps/s")
    return ", ".join(parts)


def _mean(numbers: Sequence[float]) -> float:
    try:
        return math.fsum(numbers) / len(numbers)
    except OverflowError:  # of numbers near the largest there is
        return sum(number / len(numbers) for number in numbers)


def _steps_per_sec(history: History) -> float | None:
    rows, tried, starts = laid_out(history)
    end = len(rows)
    for begin in (*reversed(starts), 0):
        if end - begin >= 2:
            first, last = begin + min(_START_UP_STEPS, end - begin - 1) - 1, end - 1
            elapsed = rows[last].time - rows[first].time
            if elapsed > 0:
                return round((tried[last] - tried[first]) / elapsed, 3)
        end = begin
    return None


def _finite(value):
    return None if isinstance(value, float) and not math.isfinite(value) else value
