"""`History`: a file with loss, loss scale and skipped steps of every training step, also across restarts."""

from __future__ import annotations

import functools
import json
import math
import os
import time
from collections.abc import Iterator
from typing import Any, Callable, NamedTuple, Union

from npu_bridge.base.files import write_whole
from npu_bridge.base.reading import open_file, parse_json, whole_number
from npu_bridge.base.secondary_files import GrowingFile
from npu_bridge.base.terminal import logger

HISTORY_FILE = "history.jsonl"  # in the folder of a training, where nobody has given it another name
_FILES = rb'^\{"(step|start)": -?\d'  # how they begin
_MOST_RANKS = 1 << 20
_LAST_SECOND = 253402300800.0  # of the year 9999
_KEPT_BYTES = 1 << 26  # some half a million steps, while the file cannot be written
_log = logger(__name__)


class StepRow(NamedTuple):
    """One step.

    Attributes:
      step: global step after this step; it does not move when the step is skipped.
      loss: the unscaled loss, or None when it was not watched.
      loss_scale: the factor this step used, or None without loss scaling.
      skipped: whether the update did not happen.
      time: seconds since the epoch.
      learning_rate: of this step, or None when it was not watched.
      precision: dtype that the step was lowered to, or "float32"; None when nothing decides it.
    """

    step: int
    loss: float | None
    loss_scale: float | None
    skipped: bool
    time: float
    learning_rate: float | None = None
    precision: str | None = None


class SessionStart(NamedTuple):
    """A training session began here: at this global step and time, with this many ranks."""

    step: int
    time: float
    ranks: int


Entry = Union[StepRow, SessionStart]
_OPTIONAL = ("learning_rate", "precision")


class History:
    """An append-only file of JSON lines, one per step, and one per start of a session.

    A resumed run continues the file: steps that came after the restored checkpoint are dropped, as they will
    be done again. A last line that was only half written when a process died is dropped, too.

    Args:
      path: the file. It need not exist; reading never creates it.
      clock: seconds since the epoch.
    Ranks: local. Let rank 0 alone write.
    """

    def __init__(self, path: str, clock: Callable[[], float] = time.time):
        self.path = os.fspath(path)
        self._clock = clock
        self._file: GrowingFile | None = None
        self.entries: list[Entry] = list(_read(self.path))

    @property
    def rows(self) -> list[StepRow]:
        """All steps, in the order they happened."""
        return [entry for entry in self.entries if isinstance(entry, StepRow)]

    @property
    def starts(self) -> list[SessionStart]:
        """All session starts, in order. The first is the start of the run, the others are resumptions."""
        return [entry for entry in self.entries if isinstance(entry, SessionStart)]

    @property
    def skipped_steps(self) -> int:
        """Skipped steps over the whole run."""
        return sum(row.skipped for row in self.rows)

    def skipped_until(self, step: int) -> int:
        """Skipped steps that happened before global step `step` was reached."""
        return sum(isinstance(entry, StepRow) and entry.skipped for entry in _up_to(self.entries, step))

    def begin_session(self, step: int, ranks: int = 1) -> None:
        """Drops what came after global step `step`, marks a new start there and opens the file for rows.

        The file is rewritten in one move, so a crash here leaves either the old or the new one. Where it cannot be
        written, the training goes on, and what happens is written later, when it can; a file that is not a history is
        left alone.
        """
        self.close()
        self.entries = _up_to(self.entries, step) + [SessionStart(step, self.now, ranks)]
        begin = functools.partial(write_whole, self.path, "".join(map(_to_line, self.entries)), _FILES)
        self._file = GrowingFile(self.path, "the history", begin, kept_bytes=_KEPT_BYTES)
        self._file.write(b"")

    @property
    def now(self) -> float:
        """Seconds since the epoch, as steps are marked with them."""
        return round(self._clock(), 3)

    def append(
        self,
        step: int,
        loss: float | None,
        loss_scale: float | None,
        skipped: bool,
        learning_rate: float | None = None,
        precision: str | None = None,
        time: float | None = None,
    ) -> None:
        """Adds one step; it is in the file when this returns, if that can be written. `time` is now, if none is given.

        Raises:
          RuntimeError: no session was begun.
        """
        if self._file is None:
            raise RuntimeError(f"History.append: {self.path} is not open for rows. Call begin_session() first.")
        row = StepRow(step, loss, loss_scale, skipped, self.now if time is None else time, learning_rate, precision)
        self.entries.append(row)
        self._file.write(_to_line(row).encode())

    def close(self) -> None:
        """Closes the file; the entries stay readable."""
        if self._file is not None:
            self._file.close()
            self._file = None


def _up_to(entries: list[Entry], step: int) -> list[Entry]:
    """The entries a checkpoint of this step knows: up to the row that reached it.

    Skipped steps after that row carry the same step number, but happened after the checkpoint was written.
    """
    reached = [i for i, e in enumerate(entries) if isinstance(e, StepRow) and e.step >= step and not e.skipped]
    if step <= 0:
        return []
    if not reached:
        return list(entries)
    first = reached[0]
    # Rows may be sparse: a first row beyond the step belongs to what is done again.
    return entries[: first + 1] if entries[first].step == step else entries[:first]


def _read(path: str) -> Iterator[Entry]:
    if not os.path.exists(path):
        return
    with open_file(path, errors="replace") as file:
        lines = file.read().split("\n")
    for number, line in enumerate(lines, 1):
        if not line:
            continue
        try:
            yield _from_line(line)
        except (ValueError, KeyError, TypeError):
            if number == len(lines):  # no newline after it: the writer died in the middle
                _log.info("%s: the last line was not finished; left out.", path)
            else:
                _log.warning("%s, line %d is not a step; left out: %.60s", path, number, line)


def _from_line(line: str) -> Entry:
    fields = parse_json(line)
    if not isinstance(fields, dict):
        raise TypeError("the line is not an object")
    if "start" in fields:
        return SessionStart(
            whole_number(fields["start"]), _time(fields["time"]), whole_number(fields["ranks"], 1, _MOST_RANKS)
        )
    precision = fields.get("precision")
    if not isinstance(precision, (str, type(None))):
        raise TypeError("precision is not a name of a dtype")
    return StepRow(
        whole_number(fields["step"]),
        _number(fields["loss"]),
        _number(fields["loss_scale"]),
        bool(fields["skipped"]),
        _time(fields["time"]),
        _number(fields.get("learning_rate")),
        precision,
    )


def _to_line(entry: Entry) -> str:
    if isinstance(entry, SessionStart):
        fields: dict[str, Any] = {"start": entry.step, "time": entry.time, "ranks": entry.ranks}
    else:
        known = {name: for_json(value) for name, value in entry._asdict().items()}
        fields = {name: value for name, value in known.items() if value is not None or name not in _OPTIONAL}
    return json.dumps(fields) + "\n"


def for_json(value: Any) -> Any:
    """A value as JSON takes it: NaN and infinity, which it does not have, as text ("nan", "inf")."""
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value


def _time(value: Any) -> float:
    seconds = float(value)
    if not 0 <= seconds < _LAST_SECOND:
        raise ValueError(f"{value!r} is no time")
    return seconds


def _number(value) -> float | None:
    return None if value is None else float(value)


def laid_out(history: History) -> tuple[list[StepRow], list[int], list[int]]:
    """All steps, for each how many were tried until then, skipped ones included, and the rows that begin sessions."""
    rows: list[StepRow] = []
    tried: list[int] = []
    starts: list[int] = []
    skipped = 0
    for entry in history.entries:
        if isinstance(entry, SessionStart):
            starts.append(len(rows))
            continue
        skipped += entry.skipped
        rows.append(entry)
        tried.append(entry.step + skipped)
    return rows, tried, starts
