"""Runs a script on N ranks of this machine and ends them all when one fails.

One thread does everything: it waits for output, reports and deaths, passes output on, and decides. A rank
that fails takes the job with it; the last thing printed is that rank's traceback and one line that names it.
"""

from __future__ import annotations

import contextlib
import os
import selectors
import signal
import sys
import time
from collections.abc import Iterator

from npu_bridge.launch.first_failure import Ending, describe, first_failure, is_decided
from npu_bridge.launch.horovod_slots import open_local_slots
from npu_bridge.launch.rank_output import JointStream
from npu_bridge.launch.rank_process import RankProcess

__all__ = ["STOP_SECS", "rank_defaults", "run_local_ranks"]

# How long a rank may take to end itself after a polite signal: enough to close files, too short to annoy.
STOP_SECS = 4.0
_TICK_SECS = 0.05
_STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
_TRACE_LINES = 40


def run_local_ranks(script: str, arguments: list[str], size: int) -> int:
    """Runs `script` on `size` ranks of this machine until all have ended.

    Ranks: rank 0's output appears as it comes, that of the others line by line behind `[rank n] `.

    Args:
      script: a Python file.
      arguments: passed to the script untouched.
      size: number of ranks, at least 1.
    Returns:
      The exit code for the shell: 0 when every rank ended with 0, else that of the rank that failed first
      (128 + signal number after a signal), or 128 + signal number when this launcher was told to stop.
    Raises:
      LaunchError: Horovod cannot be imported.
    """
    environment = {**rank_defaults(size), **os.environ}
    slots = open_local_slots(size)
    streams = {"stdout": JointStream(sys.stdout.buffer), "stderr": JointStream(sys.stderr.buffer)}
    job = _Job()
    with job.heeding_signals():
        try:
            for rank, slot in enumerate(slots):
                job.add(RankProcess(rank, script, arguments, {**environment, **slot}, streams))
            return job.run()
        except BrokenPipeError:
            # Nobody reads our output any more; nothing may be written at exit either.
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            return 128 + signal.SIGPIPE
        finally:
            job.kill()


def rank_defaults(size: int) -> dict[str, str]:
    """Environment variables that every rank gets where the caller's environment does not have them.

    The cores are shared out among the ranks; otherwise each would take all of them, and wait for the others.
    """
    share = max(1, _cores() // size)
    return {
        "OMP_NUM_THREADS": str(share),
        "TF_NUM_INTRAOP_THREADS": str(share),
        # A collective that waits must not keep other ops from running.
        "TF_NUM_INTEROP_THREADS": str(max(2, share)),
        "TF_CPP_MIN_LOG_LEVEL": "1",
        "PYTHONUNBUFFERED": "1",
    }


class _Job:
    """The running ranks and the one loop that watches them."""

    def __init__(self):
        self._ranks: list[RankProcess] = []
        self._selector = selectors.DefaultSelector()
        self._signals: list[int] = []

    def add(self, rank: RankProcess) -> None:
        self._ranks.append(rank)
        for file in rank.files():
            self._selector.register(file, selectors.EVENT_READ, rank)

    @contextlib.contextmanager
    def heeding_signals(self) -> Iterator[None]:
        """Collects stop signals for the loop instead of dying of them, while in this block."""
        before = {number: signal.getsignal(number) for number in _STOP_SIGNALS}
        # What was ignored stays so: `nohup npu-run` outlives its terminal.
        heeded = [number for number, handler in before.items() if handler != signal.SIG_IGN]
        for number in heeded:
            signal.signal(number, self._note_signal)
        try:
            yield
        finally:
            for number in heeded:
                signal.signal(number, before[number])

    def run(self) -> int:
        """Watches until all ranks have ended by themselves, one has failed or a signal came."""
        while not self._signals:
            endings = self._turn()
            if is_decided(endings, time.monotonic()):
                break
            if len(endings) == len(self._ranks) and not first_failure(endings):
                self._drain()
                return 0
        else:
            return self._stop_by_signal()
        cause = first_failure(endings)
        self._stop(signal.SIGTERM)
        return self._tell(cause, endings)

    def kill(self) -> None:
        """Leaves nothing running: neither a rank nor what a failed or stopped rank has left behind."""
        if all(rank.ending and rank.ending.exit_code == 0 for rank in self._ranks):
            return
        for rank in self._ranks:
            rank.send_signal(signal.SIGKILL)
        while any(rank.is_running for rank in self._ranks):
            time.sleep(0.001)
            for rank in self._ranks:
                rank.poll()

    def _turn(self) -> list[Ending]:
        """Waits a moment for something to read, passes it on, and looks who has ended."""
        for key, _ in self._selector.select(_TICK_SECS):
            if not key.data.read(key.fd):
                self._selector.unregister(key.fd)
        return [ending for ending in (rank.poll() for rank in self._ranks) if ending is not None]

    def _stop_by_signal(self) -> int:
        number = self._signals[0]
        print(f"npu-run: {signal.Signals(number).name}, stopping {len(self._ranks)} ranks", file=sys.stderr)
        self._stop(number)
        return 128 + number

    def _stop(self, number: int) -> None:
        """Asks the ranks to end with a signal, kills those that do not, and passes on their last output."""
        already = len(self._signals)
        for rank in self._ranks:
            if rank.is_running:
                rank.send_signal(number)
        limit = time.monotonic() + STOP_SECS
        # A second signal from the user cuts the waiting short.
        while any(rank.is_running for rank in self._ranks) and len(self._signals) == already:
            self._turn()
            if time.monotonic() >= limit:
                break
        self.kill()
        self._drain()

    def _drain(self) -> None:
        for rank in self._ranks:
            rank.drain()

    def _tell(self, cause: Ending, endings: list[Ending]) -> int:
        lines = cause.trace.splitlines()[-_TRACE_LINES:]
        if lines:
            kind = "traceback" if cause.summary else "last output"
            print(f"npu-run: {kind} of rank {cause.rank}:", *lines, sep="\n", file=sys.stderr)
        print(f"npu-run: {describe(cause, endings, len(self._ranks))}", file=sys.stderr, flush=True)
        return cause.exit_code

    def _note_signal(self, number: int, frame: object) -> None:
        self._signals.append(number)


def _cores() -> int:
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1
