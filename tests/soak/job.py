"""A training that is watched from outside: what its diary says, which processes are its own, what its log adds."""

from __future__ import annotations

import contextlib
import os
import random
import re
import signal
import struct
import subprocess
import sys
import time
from pathlib import Path
from typing import NamedTuple

import numpy as np
import psutil

from tests.npu_run.elastic_scripts import assert_alike
from tests.soak.trainings import BATCH, FACES, MICRO, ROWS

ROOT = Path(__file__).resolve().parents[2]
STEPS = 600
LIMIT_SECS = 240.0  # only what hangs takes as long as this
# Slots that are there are taken in soon: a test cannot wait for them as long as a training should.
_QUICK = "from npu_run.job import elastic\nelastic.STEADY_SECS, elastic._POLL_SECS = 1.0, 0.2\n"
_MAIN = "from npu_run.cli import main\nmain()"
_MARK = "SOAK_JOB"


class SoakError(Exception):
    """The training did not do what it should have done after a fault."""


class Start(NamedTuple):
    """The record of one start of a job: its name, its number of ranks, and by rank its runs and its process.

    A run is (update, part, nanosecond, rows).
    """

    name: str
    size: int
    runs: dict[int, list[tuple[int, int, int, str]]]
    processes: dict[int, int]

    @property
    def last(self) -> tuple[int, float]:
        """The latest update that was begun, and when, in seconds on the monotonic clock."""
        update, _, when, _ = max((runs[-1] for runs in self.runs.values() if runs), default=(-1, 0, 0, ""))
        return update, when / 1e9

    @property
    def first(self) -> tuple[int, float]:
        """The first update, and when a run of it was made."""
        update, _, when, _ = min((runs[0] for runs in self.runs.values() if runs), default=(-1, 0, 0, ""))
        return update, when / 1e9


class Job:
    """One elastic job, which can be started again.

    Args:
      folder: of its own.
      face: one of `FACES`.
      kind: "plain", "slots", "disk", "clock" or "hosts".
      chance: draws its size.
      hosts: for "hosts".
    """

    def __init__(self, folder: Path, face: str, kind: str, chance: random.Random, hosts=None):
        self.folder, self.face, self.kind, self.hosts = folder, face, kind, hosts
        self.size = 3 if hosts else chance.choice([2, 2, 3, 4])
        self.cool_down = 2 if hosts else chance.choice([0, 0, 0, 2])
        self.model = folder / ("disk/model" if kind == "disk" else "model")
        self.log, self._known = folder / "log", {}
        self.process: subprocess.Popen | None = None
        (folder / "diary").mkdir(parents=True, exist_ok=True)
        (folder / "train.py").write_text(FACES[face])
        self.log.touch()
        self.move_clock(0)
        self.offer(self.size)
        if kind == "disk":
            (folder / "disk").mkdir()
            subprocess.run(["mount", "-t", "tmpfs", "-o", "size=24m", "tmpfs", str(folder / "disk")], check=True)

    def start(self, size: int | None = None) -> None:
        """Starts the command, for the first time or again; with `size`, a plain job."""
        most = 4 if self.kind == "slots" else self.size  # as many as `_change_slots` may offer
        options = ["--min-np", "1", "--max-np", most, "--cool-down", self.cool_down, "--restarts", "1000"]
        # TensorFlow's input pipelines wait by the calendar: a clock that is set back may leave one waiting.
        options += ["--stall-secs", "100"] if self.kind == "clock" else []
        options += ["--hosts-from", "cat slots"] if self.kind == "slots" else []
        options += ["-H", "hosta:2,hostb:1"] if self.hosts else []
        words = ["-np", size] if size else options
        command = [sys.executable, "-c", _QUICK + _MAIN, *words, "train.py", self.model, self.folder, STEPS]
        command = self.hosts.command(0, *command) if self.hosts else [*map(str, command)]
        more = {_MARK: str(self.folder), "TF_CPP_MIN_LOG_LEVEL": "2"}
        path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH", "")]))
        environment = self.hosts.environment(**more) if self.hosts else {**os.environ, "PYTHONPATH": path, **more}
        if self.kind == "clock":
            environment.update(LD_PRELOAD=str(_clock_library(self.folder)), MOVED_CLOCK=str(self.folder / "moved"))
        with open(self.log, "ab") as log:
            self.process = subprocess.Popen(
                command, cwd=self.folder, env=environment, stdin=subprocess.DEVNULL, stdout=log, stderr=log
            )

    def offer(self, slots: int) -> None:
        """Says how many slots there are, in one move."""
        (self.folder / "slots.new").write_text(f"localhost:{slots}")
        (self.folder / "slots.new").rename(self.folder / "slots")

    def move_clock(self, secs: int) -> None:
        """Lets the clock of processes that were started with "clock" show so many seconds more."""
        with open(self.folder / "moved", "r+b" if (self.folder / "moved").exists() else "wb") as file:
            file.write(struct.pack("q", secs))

    def said(self, since: int = 0) -> str:
        """The log, from a size of it on."""
        with open(self.log, "rb") as file:
            file.seek(since)
            return file.read().decode(errors="replace")

    def starts(self) -> list[Start]:
        """Returns ranks that have come to a training, the latest one last; reads only the new part of each file."""
        found: dict[str, Start] = {}
        for path in sorted((self.folder / "diary").iterdir()):
            _, name, rank, size, process = path.name.split(".")
            runs, read = self._known.setdefault(path.name, ([], [0]))
            with open(path, "rb") as file:
                file.seek(read[0])
                whole = file.read().rpartition(b"\n")[0]
            read[0] += len(whole) + 1 if whole else 0
            for update, part, when, rows in map(bytes.split, whole.splitlines()):
                runs.append((int(update), int(part), int(when), rows.decode()))
            start = found.setdefault(name, Start(name, int(size), {}, {}))
            start.runs[int(rank)], start.processes[int(rank)] = runs, int(process)
        return list(found.values())

    def processes(self) -> dict[tuple[int, float], psutil.Process]:
        """Returns all running processes that have inherited the job's mark, whatever their parents are by now."""
        found = {}
        for process in psutil.process_iter():
            with contextlib.suppress(psutil.Error, OSError):
                if process.environ().get(_MARK) == str(self.folder) and process.status() != psutil.STATUS_ZOMBIE:
                    found[process.pid, process.create_time()] = process
        return found

    def ranks(self) -> dict[int, int]:
        """The process of each rank there is."""
        found = {}
        for process in self.processes().values():
            with contextlib.suppress(psutil.Error, OSError):
                if (
                    any("npu_run.rank.main" in word for word in process.cmdline())
                    and os.getsid(process.pid) == process.pid
                ):
                    found[int(process.environ().get("HOROVOD_RANK", "0"))] = process.pid
        return found

    def wait(self, is_so, what: str, limit_secs: float = LIMIT_SECS, may_end: bool = False):
        """Waits until something is true, and gives it.

        Raises:
          SoakError: it does not come true in time, or the job has ended.
        """
        limit = time.monotonic() + limit_secs
        while not (found := is_so()):
            if not may_end and self.process.poll() is not None:
                raise SoakError(f"the job has ended with exit code {self.process.returncode}; waited for: {what}")
            if time.monotonic() > limit:
                raise SoakError(f"waited {limit_secs:.0f} s in vain for: {what}")
            time.sleep(0.02)
        return found

    def wait_until_steady(self) -> Start:
        """Waits until all ranks of the latest start train, and are not about to make room for more; gives it."""

        def steady():
            starts, said = self.starts(), self.said()
            if "there are slots for" in re.split(r"npu-run: \d ranks?\b", said)[-1]:
                return None
            if not starts or len(starts[-1].runs) < starts[-1].size or not all(starts[-1].runs.values()):
                return None
            # The ranks of the next start are made one by one: as many may be those of another.
            return starts[-1] if starts[-1].processes == self.ranks() else None

        return self.wait(steady, "all ranks to train")

    def finish(self) -> None:
        """Lets the training run to its end without pauses."""
        (self.folder / "hurry").touch()
        self.wait(lambda: self.process.poll() is not None, "the end of the training", may_end=True, limit_secs=600)
        if self.process.returncode != 0:
            raise SoakError(f"the training ended with exit code {self.process.returncode}")
        self.wait(lambda: not self.processes(), "all processes to be gone", may_end=True)

    def close(self) -> None:
        """Leaves nothing running and nothing mounted."""
        while found := self.processes():
            for process in found.values():
                with contextlib.suppress(psutil.Error):
                    process.send_signal(signal.SIGKILL)
            time.sleep(0.05)
        if self.process is not None:
            self.process.wait()
        while self.kind == "disk" and os.path.ismount(self.folder / "disk"):
            subprocess.run(["umount", "-l", str(self.folder / "disk")], check=True)

    def judge(self, undisturbed: Job) -> None:
        """Compares rows and weights with those of an undisturbed training."""
        expected, dealt = _rows_by_update(undisturbed.starts()), _rows_by_update(self.starts())
        if set(expected) != set(dealt):
            raise SoakError(f"updates that were made by one training alone: {sorted(set(expected) ^ set(dealt))[:9]}")
        for update, parts in dealt.items():
            if not parts.items() <= expected[update].items():
                raise SoakError(f"update {update} had the rows {parts}, and undisturbed {expected[update]}")
        numbers = [
            number for update in sorted(expected) for _, part in sorted(expected[update].items()) for number in part
        ]
        for epoch in range(len(numbers) // ROWS):
            if len(set(numbers[epoch * ROWS : (epoch + 1) * ROWS])) != ROWS:
                raise SoakError(f"a row came twice in epoch {epoch}")
        with np.load(undisturbed.folder / "weights.npz") as weights:
            try:
                assert_alike(self.folder / "weights.npz", dict(weights))
            except AssertionError as error:
                raise SoakError(f"the weights differ from those of an undisturbed training: {error}") from error
        if re.search(r"\bnan\b", self.said(), re.I):
            raise SoakError("the log speaks of NaN")


def _rows_by_update(starts: list[Start]) -> dict[int, dict[int, tuple[str, ...]]]:
    """The rows of each update by micro-batch, after checking that each dealing of it had the same, and all of them.

    A rank that is killed in the middle of an update may not have written its last line.
    """
    count = BATCH // MICRO
    found: dict[int, dict[int, tuple[str, ...]]] = {}
    excused: set[int] = set()
    for start in starts:
        excused |= {start.last[0] - 1, start.last[0]}
        dealt: dict[int, set[int]] = {}
        for rank, runs in start.runs.items():
            for update, part, _, rows in runs:
                number = part * start.size + rank
                if number < count:  # else it does not count
                    dealt.setdefault(update, set()).add(number)
                    numbers = tuple(rows.split(","))
                    if found.setdefault(update, {}).setdefault(number, numbers) != numbers:
                        raise SoakError(f"micro-batch {number} of update {update} was dealt again, with other rows")
        for update, numbers_dealt in dealt.items():
            if len(numbers_dealt) < count and update not in excused:
                raise SoakError(f"update {update} of the start {start.name} has micro-batches {sorted(numbers_dealt)}")
    return found


def _clock_library(folder: Path) -> Path:
    library = folder / "moved_clock.so"
    if not library.exists():
        source = Path(__file__).with_name("moved_clock.c")
        subprocess.run(["cc", "-O1", "-shared", "-fPIC", "-o", str(library), str(source), "-ldl"], check=True)
    return library
