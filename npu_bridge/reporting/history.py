"""Defines `History`: a file with loss, loss scale and skips of every training step, across restarts, too."""

from __future__ import annotations

import functools
import json
import math
import os
import time
from collections.abc import Iterator, Mapping
from typing import Any, Callable, NamedTuple, TypeVar, Union

from npu_bridge.base.files import check_output_path, write_atomically
from npu_bridge.base.reading import open_file, parse_json, to_integer
from npu_bridge.base.secondary_files import GrowingFile
from npu_bridge.base.terminal import logger

HISTORY_FILE = "history.jsonl"  # default name in the folder of a training
_FILES = rb'^\{"(step|start|evaluation|facts|comparison)": -?\d'  # how these files begin
_MOST_RANKS = 1 << 20
_LAST_SECOND = 253402300800.0  # of the year 9999
_KEPT_BYTES = 1 << 26  # enough for about half a million steps, while the file cannot be written
_log = logger(__name__)
_Value = TypeVar("_Value")


class StepRow(NamedTuple):
    """One step.

    Attributes:
      step: global step after this step; a skipped step does not change it.
      loss: the unscaled loss, or None if it is not known.
      loss_scale: the loss scale of this step, or None without loss scaling.
      skipped: whether the update was skipped.
      time: seconds since the epoch.
      learning_rate: learning rate of this step, or None if it is not known.
      precision: dtype in which the step was computed, such as "bfloat16, imitated" or "float32"; None without a
        precision option.
    """

    step: int
    loss: float | None
    loss_scale: float | None
    skipped: bool
    time: float
    learning_rate: float | None = None
    precision: str | None = None


class SessionStart(NamedTuple):
    """The start of a training session: its global step, its time and its number of ranks."""

    step: int
    time: float
    ranks: int


class Evaluation(NamedTuple):
    """An evaluation.

    Attributes:
      step: global step of the checkpoint.
      time: end of the evaluation, in seconds since the epoch.
      metrics: its numbers by name, usually with "loss".
      name: the name given to `Estimator.evaluate`; "" without one.
      batches, secs: number of batches and duration; None if not known.
    """

    step: int
    time: float
    metrics: dict[str, float]
    name: str = ""
    batches: int | None = None
    secs: float | None = None

    @classmethod
    def of(
        cls, step: int, metrics: Mapping[str, Any], name: str, batches: int | None, secs: float | None, time: float
    ) -> Evaluation:
        """Makes an `Evaluation` from the metrics that are single numbers; leaves out `global_step`."""
        numbers = {key: float(value) for key, value in metrics.items() if key != "global_step" and is_number(value)}
        return cls(step, time, numbers, name, batches, None if secs is None else round(secs, 3))


class SessionFacts(NamedTuple):
    """Facts about a session besides its steps; None for unknown facts. A later entry adds to earlier entries.

    Attributes:
      step: global step when the entry was written.
      time: seconds since the epoch.
      samples_per_step: samples of all ranks in one step.
      parameters: number of trained parameters.
      memory_bytes: peak memory of each rank, by rank number.
      gpu_memory_bytes: peak GPU memory of each rank, by rank number.
    """

    step: int
    time: float
    samples_per_step: int | None = None
    parameters: int | None = None
    memory_bytes: dict[int, int] | None = None
    gpu_memory_bytes: dict[int, int] | None = None


class Comparison(NamedTuple):
    """A comparison of how the ranks of a job spent the time of the previous steps. Not every comparison is recorded.

    Attributes:
      step: global step at the comparison.
      time: seconds since the epoch.
      own_ms: for each rank, its own work in a step: input, hooks and computation, until its last gradient is ready.
      waiting: for each rank, the fraction of a typical step in which the rank waited for reductions.
      slow: the slow ranks.
    """

    step: int
    time: float
    own_ms: list[float]
    waiting: list[float]
    slow: list[int]


Entry = Union[StepRow, SessionStart, Evaluation, SessionFacts, Comparison]
_OPTIONAL = (*StepRow._fields[5:], *Evaluation._fields[3:], *SessionFacts._fields[2:])
# First key of a line, in place of "step".
_FIRST = {SessionStart: "start", Evaluation: "evaluation", SessionFacts: "facts", Comparison: "comparison"}


class History:
    """An append-only file of JSON lines: one for each step, session start, evaluation, note of facts, and comparison.

    A resumed run continues the file: steps after the restored checkpoint are dropped, as they will be done again. If a
    process died while it wrote the last line, this line is dropped, too.

    Args:
      path: the file. It need not exist; reading never creates it.
      clock: returns seconds since the epoch.
    Ranks: local. Let only rank 0 write.
    """

    def __init__(self, path: str, clock: Callable[[], float] = time.time):
        self.path = os.fspath(path)
        self._clock = clock
        self._file: GrowingFile | None = None
        self._is_open = False
        self.entries: list[Entry] = list(_parse_lines(self.path, _read_lines(self.path)))

    @property
    def rows(self) -> list[StepRow]:
        """All steps, in the order in which they were made."""
        return [entry for entry in self.entries if isinstance(entry, StepRow)]

    @property
    def starts(self) -> list[SessionStart]:
        """All session starts, in order. The first starts the run, the others resume it."""
        return [entry for entry in self.entries if isinstance(entry, SessionStart)]

    @property
    def evaluations(self) -> list[Evaluation]:
        """All evaluations, in order."""
        return [entry for entry in self.entries if isinstance(entry, Evaluation)]

    @property
    def comparisons(self) -> list[Comparison]:
        """Comparisons of the ranks' speed, ordered by step."""
        return [entry for entry in self.entries if isinstance(entry, Comparison)]

    @property
    def facts(self) -> SessionFacts:
        """The known facts of all sessions; a later value replaces an earlier one."""
        known: dict[str, Any] = {"step": 0, "time": 0.0}
        for entry in self.entries:
            if isinstance(entry, SessionFacts):
                known.update((name, value) for name, value in entry._asdict().items() if value is not None)
        return SessionFacts(**known)

    @property
    def skipped_steps(self) -> int:
        """Number of skipped steps in the whole run."""
        return sum(row.skipped for row in self.rows)

    def count_skipped_steps_until(self, step: int) -> int:
        """Returns the number of steps that were skipped before global step `step` was reached."""
        return sum(isinstance(entry, StepRow) and entry.skipped for entry in _entries_until(self.entries, step))

    def begin_session(self, step: int, ranks: int = 1) -> None:
        """Drops the entries after global step `step`, adds a session start there, and opens the file for steps.

        Unless the file has exactly the entries to keep, it is replaced as a whole, so a crash leaves the old or the new
        file. If the file cannot be written, the training continues, and entries are kept until it can. A file that is
        not a history is left alone. Evaluations that other objects have added to the file are kept.
        """
        self.close()
        known = {(each.step, each.time, each.name) for each in self.evaluations}
        lines = _read_lines(self.path)
        added = _parse_lines(self.path, [line if line.startswith('{"evaluation"') else "" for line in lines])
        self.entries += [e for e in added if isinstance(e, Evaluation) and (e.step, e.time, e.name) not in known]
        kept, start = _entries_until(self.entries, step), SessionStart(step, self.now, ranks)
        has_kept = lines[-1] == "" and len(lines) - 1 == len(self.entries) == len(kept)
        self.entries = [*kept, start]
        text = "".join(map(_format_line, [start] if has_kept else self.entries))
        self._file = self._make_file(None if has_kept else functools.partial(write_atomically, self.path, text, _FILES))
        self._file.write(text.encode() if has_kept else b"")
        self._is_open = True

    @property
    def now(self) -> float:
        """The current time in seconds since the epoch, rounded as in the entries."""
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
        """Adds one step, and writes it to the file at once if possible. The default of `time` is the current time.

        Raises:
          RuntimeError: no session was begun.
        """
        if not self._is_open:
            raise RuntimeError(f"History.append: {self.path} is not open for steps. Call begin_session() first.")
        self._add(
            StepRow(step, loss, loss_scale, skipped, self.now if time is None else time, learning_rate, precision)
        )

    def append_evaluation(
        self,
        step: int,
        metrics: Mapping[str, Any],
        name: str = "",
        batches: int | None = None,
        secs: float | None = None,
    ) -> Evaluation:
        """Adds an evaluation with the metrics that are single numbers, also between sessions; returns the new entry."""
        entry = Evaluation.of(step, metrics, name, batches, secs, self.now)
        self._add(entry)
        return entry

    def note_facts(self, step: int, **facts: Any) -> None:
        """Adds facts about this session; the keywords are names of fields of `SessionFacts`."""
        self._add(SessionFacts(step, self.now, **facts))

    def note_comparison(self, comparison: Comparison) -> None:
        """Adds a comparison of the ranks."""
        self._add(comparison)

    def close(self) -> None:
        """Closes the file; the entries can still be read."""
        self._is_open = False
        if self._file is not None:
            self._file.close()

    def _make_file(self, begin: Callable[[], None] | None = None) -> GrowingFile:
        begin = begin or functools.partial(check_output_path, self.path, _FILES)
        return GrowingFile(self.path, "the history", begin, kept_bytes=_KEPT_BYTES)

    def _add(self, entry: Entry) -> None:
        self.entries.append(entry)
        if self._file is None:
            self._file = self._make_file()
        self._file.write(_format_line(entry).encode())
        if not self._is_open:  # between sessions
            self._file.close()


def _entries_until(entries: list[Entry], step: int) -> list[Entry]:
    """Returns the entries before the checkpoint of a step: up to the row that reached the step.

    Skipped steps after that row have the same step number, but come after the checkpoint. Evaluations, facts and
    comparisons up to the step are kept, too.
    """
    reached = [i for i, e in enumerate(entries) if isinstance(e, StepRow) and e.step >= step and not e.skipped]
    if step <= 0 or not reached:
        return list(entries) if step > 0 else []
    # Rows can be sparse: a first row beyond the step belongs to steps that will be done again.
    end = reached[0] + (entries[reached[0]].step == step)
    # Evaluations, for example, can precede earlier steps that were written to the file later.
    return [
        entry
        for place, entry in enumerate(entries)
        if (entry.step <= step if isinstance(entry, (Evaluation, SessionFacts, Comparison)) else place < end)
    ]


def _read_lines(path: str) -> list[str]:
    if not os.path.exists(path):
        return [""]
    with open_file(path, errors="replace") as file:
        return file.read().split("\n")


def _parse_lines(path: str, lines: list[str]) -> Iterator[Entry]:
    for number, line in enumerate(lines, 1):
        try:
            if line:
                yield _parse_line(line)
        except (ValueError, KeyError, TypeError):
            if number == len(lines):  # without a newline: the writing process died in the middle
                _log.info("%s: the last line is incomplete and was left out.", path)
            else:
                _log.warning("%s, line %d is not an entry and was left out: %.60s", path, number, line)


def _parse_line(line: str) -> Entry:
    fields = parse_json(line)
    if not isinstance(fields, dict):
        raise TypeError("the line is not an object")
    if "start" in fields:
        return SessionStart(
            to_integer(fields["start"]), _parse_time(fields["time"]), to_integer(fields["ranks"], 1, _MOST_RANKS)
        )
    time = _parse_time(fields["time"])
    if "evaluation" in fields:
        metrics = {str(name): float(value) for name, value in dict(fields["metrics"]).items()}
        batches, secs = _parse_optional(to_integer, fields.get("batches")), _parse_optional(float, fields.get("secs"))
        return Evaluation(to_integer(fields["evaluation"]), time, metrics, str(fields.get("name", "")), batches, secs)
    if "facts" in fields:
        samples, parameters = (_parse_optional(to_integer, fields.get(name)) for name in SessionFacts._fields[2:4])
        memory, of_gpu = (_parse_optional(_parse_counts_by_rank, fields.get(name)) for name in SessionFacts._fields[4:])
        return SessionFacts(to_integer(fields["facts"]), time, samples, parameters, memory, of_gpu)
    if "comparison" in fields:
        return _parse_comparison(fields, time)
    precision = fields.get("precision")
    if not isinstance(precision, (str, type(None))):
        raise TypeError("precision is not a name of a dtype")
    return StepRow(
        to_integer(fields["step"]),
        _parse_optional(float, fields["loss"]),
        _parse_optional(float, fields["loss_scale"]),
        bool(fields["skipped"]),
        time,
        _parse_optional(float, fields.get("learning_rate")),
        precision,
    )


def _parse_comparison(fields: Mapping[str, Any], time: float) -> Comparison:
    own_ms, waiting = ([float(each) for each in fields[name]] for name in ("own_ms", "waiting"))
    slow = [to_integer(rank, maximum=len(own_ms) - 1) for rank in fields["slow"]]
    if len(own_ms) != len(waiting) or len(own_ms) < 2 or not all(map(math.isfinite, own_ms + waiting)):
        raise ValueError("a comparison has a number for each rank")
    return Comparison(to_integer(fields["comparison"]), time, own_ms, waiting, slow)


def _format_line(entry: Entry) -> str:
    known = {name: to_json_value(value) for name, value in entry._asdict().items()}
    fields = {_FIRST.get(type(entry), "step"): known.pop("step")}
    fields.update((name, value) for name, value in known.items() if value not in (None, "") or name not in _OPTIONAL)
    return json.dumps(fields) + "\n"


def to_json_value(value: Any) -> Any:
    """Converts a value for JSON: numpy's numbers become Python's, NaN and infinity become strings ("nan", "inf")."""
    if isinstance(value, dict):
        return {key: to_json_value(each) for key, each in value.items()}
    if hasattr(value, "item") and value.shape == ():
        value = value.item()
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value


def _parse_time(value: Any) -> float:
    seconds = float(value)
    if not 0 <= seconds < _LAST_SECOND:
        raise ValueError(f"{value!r} is no time")
    return seconds


def _parse_optional(parse: Callable[[Any], _Value], value: Any) -> _Value | None:
    return None if value is None else parse(value)


def is_number(value: Any) -> bool:
    """Returns whether a value is a single number, of Python or numpy."""
    return isinstance(value, (int, float)) or (getattr(value, "shape", None) == () and value.dtype.kind in "fiub")


def _parse_counts_by_rank(counts: Any) -> dict[int, int]:
    return {to_integer(int(rank), maximum=_MOST_RANKS): to_integer(value) for rank, value in dict(counts).items()}


def list_rows_and_starts(history: History) -> tuple[list[StepRow], list[int], list[int]]:
    """Returns all rows; for each row, the steps tried so far; and the indices of the rows that begin sessions."""
    rows: list[StepRow] = []
    tried: list[int] = []
    starts: list[int] = []
    skipped = 0
    for entry in history.entries:
        if isinstance(entry, SessionStart):
            starts.append(len(rows))
        elif isinstance(entry, StepRow):
            skipped += entry.skipped
            rows.append(entry)
            tried.append(entry.step + skipped)
    return rows, tried, starts
