"""Records a few steps of contenders on every rank, and draws one step of each on one scale."""

from __future__ import annotations

import json
import pathlib
from collections.abc import Mapping
from typing import Any

_STEPS = range(2, 9)  # the first ones are slow


def record_steps(session: Any, steps: Mapping[str, Any], folder: str, rank: int, in_a_row: int = 1) -> None:
    """Runs and records training steps on a rank.

    Args:
      session: a session whose graph has no global step.
      steps: dict from contender to its training step.
      in_a_row: number of training steps in a session run.
      folder: folder for a file of each contender and rank.
      rank: this rank; all ranks call this function.
    """
    from npu_bridge.base.session_wrapper import add_engine
    from npu_bridge.reporting.step_recorder import StepRecorder
    from npu_bridge.session.hooked_session import TrainingHookEngine

    recorded = range(_STEPS.start * in_a_row, _STEPS.stop * in_a_row)
    for name, step in steps.items():
        add_engine(session, TrainingHookEngine([StepRecorder(recorded, str(_file_of(folder, name, rank)), rank)]))
        for _ in range(_STEPS.stop):
            session.run(step)


def draw_steps(folder: str, names: tuple[str, str], ranks: int, picture: str) -> None:
    """Draws the typical step of two contenders, as `record_steps` has recorded them, one below the other.

    Args:
      folder: as `record_steps` got it.
      names: the contenders.
      ranks: number of ranks that have recorded.
      picture: SVG file to write.
    """
    from npu_bridge.reporting.tail_picture import compare
    from npu_bridge.reporting.tail_report import merge_traces, typical_step

    shown = []
    for name in names:
        found = [json.loads(_file_of(folder, name, rank).read_text())["npu_bridge"] for rank in range(ranks)]
        shown.append(typical_step(merge_traces(found)))
    pathlib.Path(picture).write_text(compare(*shown, names), encoding="utf-8")


def draw_overlap(folder: str, name: str, ranks: int, picture: str) -> None:
    """Draws the overlapping steps of a contender, as `record_steps` has recorded them; arguments as of `draw_steps`."""
    from npu_bridge.reporting.tail_picture import draw_overlapping_steps
    from npu_bridge.reporting.tail_report import merge_traces

    found = [json.loads(_file_of(folder, name, rank).read_text())["npu_bridge"] for rank in range(ranks)]
    own = [trace for trace in merge_traces(found, "overlapping_steps") if trace.rank == 0]
    pathlib.Path(picture).write_text(draw_overlapping_steps(own, ranks), encoding="utf-8")


def _file_of(folder, name, rank):
    return pathlib.Path(folder, f"{name.replace(' ', '_').replace(',', '')}_{rank}.json")
