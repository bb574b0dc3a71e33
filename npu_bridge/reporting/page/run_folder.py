"""Reads the files in the folder of a run, without TensorFlow."""

from __future__ import annotations

import contextlib
import os
import statistics
from collections.abc import Mapping
from typing import Any, NamedTuple

from npu_bridge.base.reading import RefusedFileError, open_file, read_json, read_text, to_integer
from npu_bridge.options.rank_table import MOST_RANKS
from npu_bridge.reporting.history import HISTORY_FILE, History
from npu_bridge.reporting.page.facts import FACTS_FILE

_PICTURE, _TAIL = "tail.svg", "tail.json"
_TEXTS, _ROWS = ("script", "command", "folder", "history"), ("options", "variables", "environment")


class NoRunError(ValueError):
    """Raised when a folder does not hold the requested run or timeline."""


class Timeline(NamedTuple):
    """A recording of `npu-run --timeline`.

    Attributes:
      picture: the text of its SVG file.
      steps: the recorded steps.
      step_ms, exposed_ms: duration of the step in the picture, and its exposed tail, the time after the backward pass
        in which the rank only waits for communication.
      by_rank: the medians of duration and exposed tail, by rank.
    """

    picture: str
    steps: list[int]
    step_ms: float
    exposed_ms: float
    by_rank: dict[int, tuple[float, float]]


class RunFolder(NamedTuple):
    """The contents of a run folder.

    Attributes:
      path: the folder.
      history: the steps of the run: at least one, unless an error stopped the first step.
      facts: the facts recorded by the training process (`facts.py`), possibly empty.
      timeline: the timeline; None if none was recorded.
    """

    path: str
    history: History
    facts: Mapping[str, Any]
    timeline: Timeline | None


def read_run_folder(path: str, timeline: str | None = None, history: History | None = None) -> RunFolder:
    """Reads a run folder.

    Args:
      path: path of the folder.
      timeline: folder with `tail.svg` and `tail.json`. None: the run folder itself, or the folder `timeline` in it.
      history: the history of the run, if it is already loaded.
    Raises:
      NoRunError: the folder, its history, a step in the history, or the given timeline does not exist.
    """
    if not os.path.isdir(path):
        raise NoRunError(f"there is no folder {path!r}. Name the folder of a training, such as its model_dir.")
    facts = _read_json(os.path.join(path, FACTS_FILE)) or {}
    _check_facts(facts, os.path.join(path, FACTS_FILE))
    history = _find_history(path, facts) if history is None else history
    if not history.rows and not facts.get("failure"):
        raise NoRunError(
            f"{path} holds no steps of a training. Expected {HISTORY_FILE}, as NPUEstimator and HistoryHook write it, "
            f"with at least one step; got {'none' if os.path.exists(history.path) else 'no such file'}. Name the "
            f"folder of another training, or add HistoryHook('{os.path.join(path, HISTORY_FILE)}') to its hooks."
        )
    folders = [timeline] if timeline is not None else [path, os.path.join(path, "timeline")]
    recorded = next(filter(None, map(_read_timeline, folders)), None)
    if timeline is not None and recorded is None:
        raise NoRunError(
            f"{timeline} holds no timeline. Expected {_PICTURE} and {_TAIL}; got other contents. Name the folder that "
            f"npu-run --timeline wrote to."
        )
    return RunFolder(path, history, facts, recorded)


def _find_history(path: str, facts: Mapping[str, Any]) -> History:
    """Returns the history that the training has recorded in its facts, or the history with the usual name."""
    named = facts.get("history")
    names = [named] if isinstance(named, str) else []
    for name in [*names, HISTORY_FILE]:
        with contextlib.suppress(FileNotFoundError), open_file(name, within_folder=path):
            return History(os.path.join(path, name))
    return History(os.path.join(path, HISTORY_FILE))


def _check_facts(facts: Mapping[str, Any], path: str) -> None:
    """Checks the types of the facts for the page: texts, rows of tables, and a mapping for each rank."""
    for name in _TEXTS:
        if not isinstance(facts.get(name, ""), str):
            raise _damaged_error(path, name, "a text")
    for name in _ROWS:
        rows = facts.get(name) or []
        if not isinstance(rows, list) or not all(isinstance(row, list) for row in rows):
            raise _damaged_error(path, name, "a list of rows")
    ranks = facts.get("ranks") or []
    if not isinstance(ranks, list) or not all(isinstance(rank, dict) for rank in ranks):
        raise _damaged_error(path, "ranks", "a mapping for each rank")
    failure = facts.get("failure") or {}
    frames = failure.get("frames") or [] if isinstance(failure, dict) else None
    if not isinstance(frames, list) or not all(isinstance(frame, list) and len(frame) == 4 for frame in frames):
        raise _damaged_error(path, "failure", "an object whose frames have four entries each")


def _damaged_error(path: str, name: str, expected: str) -> NoRunError:
    return NoRunError(
        f"{path} is damaged: {name!r} has the wrong form. Expected {expected}. Remove the file for a page "
        f"without its contents."
    )


def _read_timeline(folder: str) -> Timeline | None:
    facts = _read_json(os.path.join(folder, _TAIL))
    if not facts:
        return None
    try:
        picture = read_text(_PICTURE, within_folder=folder)
        by_rank: dict[int, list[tuple[float, float]]] = {}
        for trace in facts["traces"]:
            times = float(trace["duration_ms"]), float(trace["exposed_ms"])
            by_rank.setdefault(to_integer(trace["rank"], maximum=MOST_RANKS - 1), []).append(times)
        medians = {
            rank: tuple(statistics.median(column) for column in zip(*pairs)) for rank, pairs in sorted(by_rank.items())
        }
        steps = [to_integer(step) for step in facts["steps"]]
        if not steps:
            return None
        return Timeline(picture, steps, float(facts["step_ms"]), float(facts["exposed_ms"]), medians)
    except RefusedFileError:
        raise
    except (OSError, ValueError, KeyError, TypeError):
        return None


def _read_json(path: str) -> dict[str, Any] | None:
    try:
        found = read_json(os.path.basename(path), within_folder=os.path.dirname(path))
    except RefusedFileError:
        raise
    except (OSError, ValueError):
        return None
    return found if isinstance(found, dict) else None
