"""Reads the losses of a training step by step, from its history or from event files."""

from __future__ import annotations

import os
import re
from typing import NamedTuple

import numpy as np

from npu_bridge.base.errors import listed
from npu_bridge.reporting.history import HISTORY_FILE, History
from npu_bridge.reporting.page.run_folder import NoRunError, read_run_folder
from npu_run.compare.events import read_scalars
from npu_run.compare.verdict import NotComparableError, NothingToCompareError

_REPEAT = re.compile(r"repeat-(\d+)")
# Tags of losses, the likeliest first: ours, Estimators', Keras's.
_TAGS = ("training/loss", "loss", "loss_1", "total_loss", "batch_loss", "epoch_loss", "train/loss")


class Losses(NamedTuple):
    """The losses of one training.

    Attributes:
      path: path of its folder.
      steps: global steps, ascending, each once.
      values: the loss of each step, float64; NaN and infinity are kept.
      ranks: number of ranks; None if not recorded.
      precision: the low dtype of the steps; None if all steps were float32, or if not recorded.
    """

    path: str
    steps: np.ndarray
    values: np.ndarray
    ranks: int | None = None
    precision: str | None = None


def list_repeat_folders(folder: str) -> list[str]:
    """Returns the subfolders `repeat-0`, `repeat-1`, ... of `npu-run --repeat`, in order, or else the folder itself."""
    try:
        found = [(int(match[1]), name) for name in os.listdir(folder) if (match := _REPEAT.fullmatch(name))]
    except OSError:
        found = []
    return [os.path.join(folder, name) for _, name in sorted(found)] or [folder]


def read_repeats(folder: str, tag: str | None = None) -> list[Losses]:
    """Reads the losses of every repeat in a folder, or of the folder's single training.

    Raises:
      NotComparableError: there are no files with losses, or the files have no loss.
    """
    return [read_losses(path, tag) for path in list_repeat_folders(folder)]


def read_losses(path: str, tag: str | None = None) -> Losses:
    """Reads the losses of a training.

    Args:
      path: folder or history file of the training.
      tag: name of the loss in event files. None reads the history file; if there is none, a usual tag of event files.
    Raises:
      NotComparableError: there are no such files, or the files have no loss.
    """
    if not os.path.exists(path):
        raise NotComparableError(f"There is no {path!r}; name the folder of a training, such as its model_dir.")
    if tag is None:
        try:
            history = read_run_folder(path).history if os.path.isdir(path) else History(path)
        except NoRunError:
            history = None
        if history is not None and history.rows:
            return _losses_of_history(path, history)
    if os.path.isdir(path):
        tags = read_scalars(path)
        chosen = next((name for name in ((tag,) if tag else _TAGS) if name in tags), None)
        if chosen is not None:
            points = sorted(tags[chosen].items())
            return Losses(path, *_as_arrays(points))
        if tags and tag:
            raise NotComparableError(
                f"{path} has no event with the tag {tag!r}; its tags are {listed(sorted(tags), 8)}."
            )
        if tags:
            raise NotComparableError(
                f"{path} has event files without a loss under a usual name; name the loss with --tag, one of "
                f"{listed(sorted(tags), 8)}."
            )
    raise NothingToCompareError(
        f"{path} holds no losses; expected {HISTORY_FILE} with at least one step, or event files."
    )


def _losses_of_history(path: str, history: History) -> Losses:
    # A skipped step has the number of the previous one, and is done again.
    points = {row.step: row.loss for row in history.rows if row.loss is not None and not row.skipped}
    if not points:
        raise NotComparableError(
            f"{history.path} has {len(history.rows)} steps and no loss; give the HistoryHook the loss."
        )
    ranks = history.starts[-1].ranks if history.starts else None
    lowered = {row.precision.partition(",")[0] for row in history.rows if row.precision} - {"float32"}
    precision = min(lowered) if lowered else None  # "bfloat16" rounds more than "float16"
    return Losses(path, *_as_arrays(sorted(points.items())), ranks, precision)


def _as_arrays(points) -> tuple[np.ndarray, np.ndarray]:
    return np.array([step for step, _ in points], np.int64), np.array([loss for _, loss in points], np.float64)
