"""Runs elastic jobs: a job that loses ranks or hosts resumes with the remaining slots, and later uses new slots too.

A job is a sequence of starts. Each start has as many ranks as there are slots (within the given bounds), and resumes
from the last checkpoint. A start ends when ranks are lost; it ends after a whole step if there are slots for more
ranks.
"""

from __future__ import annotations

import itertools
import os
import signal
import subprocess
import threading
import time
from collections.abc import Mapping
from typing import Callable, NamedTuple

from npu_bridge.base.secondary_files import describe_failure
from npu_bridge.options.rank_table import MOST_RANKS
from npu_run.errors import LaunchError
from npu_run.job.hosts import JobPlan, is_this_machine, read_hosts
from npu_run.job.outcome import Outcome

WAIT_SECS = 600.0
# A job is stopped for more ranks only after extra slots have existed for this long.
STEADY_SECS = 10.0
_POLL_SECS = 5.0
_ANSWER_SECS = 20.0
_SILENT_SECS = 2.0
_MOST_FRUITLESS = 3
_MOST_DOUBLINGS = 4
_NO_RANKS_EXIT_CODE = 69  # EX_UNAVAILABLE


class RankBounds(NamedTuple):
    """The smallest and largest number of ranks of an elastic job, and its waiting times.

    Attributes:
      least, most: smallest and largest number of ranks.
      wait_secs: how long to wait for `least` slots.
      cool_down_secs: how long to avoid a slot that has lost its rank; this time doubles with each further loss on the
        host.
    """

    least: int
    most: int
    wait_secs: float = WAIT_SECS
    cool_down_secs: float = 60.0


def determine_rank_bounds(
    min_ranks: int | None,
    max_ranks: int | None,
    size: int | None,
    plan: JobPlan | None,
    hosts_command: str | None,
    excluded_hosts: list[str],
) -> tuple[int, int]:
    """Returns the smallest and the largest number of ranks of an elastic job, from options of the command line.

    Args:
      min_ranks, max_ranks, size: values of --min-np, --max-np and -np.
      plan: plan with all slots that are named; None if no hosts are named.
      hosts_command: the command of --hosts-from.
      excluded_hosts: options that were given but do not work with an elastic job.
    Raises:
      LaunchError: options contradict each other, or an option is missing.
    """
    if plan is not None and hosts_command:
        raise LaunchError("--hosts-from and other ways to name hosts exclude each other. Name the hosts in one way.")
    if excluded_hosts:
        raise LaunchError(
            f"{excluded_hosts[0]} requires a fixed number of ranks. Omit {excluded_hosts[0]}, or the elastic options."
        )
    named = MOST_RANKS if hosts_command else None if plan is None else plan.size
    max_ranks = max_ranks or size or named
    if max_ranks is None:
        raise LaunchError("--min-np alone does not limit the number of ranks. Add --max-np N, or name hosts with -H.")
    min_ranks = min_ranks or 1
    for name, number in (("--max-np", max_ranks), *(() if named is None else (("the hosts", named),))):
        if min_ranks > number:
            where = f"{name} offer {number}" if name == "the hosts" else f"{name} is {number}"
            raise LaunchError(
                f"--min-np {min_ranks} cannot be reached, as {where}. Lower --min-np, or allow more ranks."
            )
    return min_ranks, max_ranks


class HostsCommand:
    """Runs a command regularly that prints hosts, as Horovod's discovery scripts do; a call returns the latest slots.

    Args:
      command: a shell command line, which prints a line such as host1:4 for each host that is up.
      say: called with a sentence if the command fails, hangs or prints anything else; the last known hosts then stay.
    """

    def __init__(self, command: str, say: Callable[[str], None]):
        self._command, self._say = command, say
        self._slots: dict[str, int] = {}
        self._problem = ""
        threading.Thread(target=self._run_periodically, name="npu-run hosts", daemon=True).start()

    def __call__(self) -> dict[str, int]:
        return self._slots

    def _run_periodically(self) -> None:
        while True:
            problem = self._run_command()
            if problem and problem != self._problem:
                kept = "the hosts it named before stay" if self._slots else "no host is known yet"
                self._say(f"--hosts-from {self._command}: {problem}; {kept}")
            self._problem = problem
            time.sleep(_POLL_SECS)

    def _run_command(self) -> str:
        """Runs the command once and stores the slots; returns the problem with the command or its output, or ""."""
        try:
            process = subprocess.Popen(
                self._command,
                shell=True,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                start_new_session=True,
            )
        except OSError as error:  # no memory or no process number is free, say
            return f"it cannot be started: {describe_failure(error)}"
        with process:
            try:
                output, _ = process.communicate(timeout=_ANSWER_SECS)
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, signal.SIGKILL)  # also the processes that it has started
                return f"no answer within {_ANSWER_SECS:.0f} s"
        if process.returncode:
            return f"exit code {process.returncode}"
        try:
            self._slots = read_hosts(output.decode(errors="replace").splitlines(), "its output")
        except LaunchError as error:
            return str(error).rstrip(".")
        return ""


class AvailableSlots:
    """The slots that a job can use.

    Args:
      slots: returns all current slots by host; "" is this machine.
      bounds: the smallest and largest number of ranks of the job, and its waiting times.
    """

    def __init__(self, slots: Callable[[], Mapping[str, int]], bounds: RankBounds):
        self._slots, self._bounds = slots, bounds
        self._cooling: list[tuple[str, float]] = []
        self._losses: dict[str, int] = {}
        self._size = 0
        self._hosts: list[str] = []
        self._more_since: float | None = None

    def usable_slots_at(self, now: float) -> dict[str, int]:
        """Returns the number of usable slots by host, without slots that have recently lost their rank."""
        self._cooling = [(host, until) for host, until in self._cooling if until > now]
        cooling = [host for host, _ in self._cooling]
        left = {host: slots - cooling.count(host) for host, slots in self._slots().items()}
        return {host: slots for host, slots in left.items() if slots > 0}

    def make_plan(self, now: float) -> JobPlan | None:
        """Plans a job with as many ranks as possible; returns None if there are too few slots.

        Hosts that already had ranks come first. If hosts share no folder, only such a host has the
        checkpoints, and rank 0, which runs on the first host, needs them.
        """
        slots = self.usable_slots_at(now)
        size = min(self._bounds.most, sum(slots.values()))
        if size < self._bounds.least:
            return None
        slots = {host: slots[host] for host in (*filter(slots.__contains__, self._hosts), *slots)}
        filled = itertools.accumulate(slots.values(), initial=0)
        self._hosts = [host for host, before in zip(slots, filled) if before < size]
        self._size, self._more_since = size, None
        return JobPlan(size, {} if list(slots) == [""] else slots)

    def avoid_lost_slots(self, hosts: tuple[str, ...], now: float) -> None:
        """Avoids a slot for each entry of `hosts` for a while; a host can have several entries; "" is this machine."""
        here = next(filter(is_this_machine, filter(None, self._slots())), "")
        hosts = tuple(host or here for host in hosts)
        for host in set(hosts):
            self._losses[host] = self._losses.get(host, 0) + 1
        for host in hosts:
            doublings = min(self._losses[host] - 1, _MOST_DOUBLINGS)
            self._cooling.append((host, now + self._bounds.cool_down_secs * 2**doublings))

    def reason_to_resize(self, now: float) -> str:
        """Returns why the current job should end and start with more ranks, or ""."""
        size = min(self._bounds.most, sum(self.usable_slots_at(now).values()))
        if size <= self._size:
            self._more_since = None
            return ""
        self._more_since = self._more_since or now
        return (
            f"there are slots for {size} ranks in place of {self._size}"
            if now >= self._more_since + STEADY_SECS
            else ""
        )


def run_elastic(
    run: Callable[[JobPlan, Callable[[], str]], Outcome],
    available_slots: AvailableSlots,
    bounds: RankBounds,
    restarts: int,
    say: Callable[[str], None],
) -> int:
    """Runs an elastic job until it succeeds, its script fails too often, or it has too few slots for too long.

    Args:
      run: function that runs a job from a plan. Its second argument is a function; once this function
        returns a reason to stop, the job ends after a whole step.
      available_slots: the slots that the job can use.
      bounds: the bounds of the job.
      restarts: how often to restart a job whose script failed; restarts after lost ranks do not count.
      say: called with progress messages.
    Returns:
      The exit code.
    """
    failures = fruitless = 0
    while True:
        plan = _wait_for_plan(available_slots, bounds, say)
        if plan is None:
            say(f"there were fewer than {bounds.least} slots for {bounds.wait_secs:.0f} s; given up")
            return _NO_RANKS_EXIT_CODE
        ranks = f"{plan.size} rank{'' if plan.size == 1 else 's'}"
        say(f"{ranks}{f' on {plan.hosts}' if plan.slots else ''}")
        outcome = run(plan, lambda: available_slots.reason_to_resize(time.monotonic()))
        if outcome.was_resized:
            fruitless = 0  # only a training ends for new slots
            continue
        if not outcome.has_failed:
            return outcome.exit_code
        fruitless = 0 if outcome.has_trained else fruitless + 1
        is_outside = bool(outcome.lost) or outcome.was_torn
        if is_outside and fruitless < _MOST_FRUITLESS:
            available_slots.avoid_lost_slots(outcome.lost, time.monotonic())
            what = f"{len(outcome.lost)} of {plan.size} ranks" if outcome.lost else "connections between ranks"
            say(f"{what} lost; the job resumes from its last checkpoint")
        elif not is_outside and failures < restarts:
            failures += 1
            say(f"restart {failures} of {restarts}, after exit code {outcome.exit_code}")
        else:
            if fruitless >= _MOST_FRUITLESS:
                say(f"{fruitless} starts in a row ended before any training began; given up")
            return outcome.exit_code


def _wait_for_plan(available_slots: AvailableSlots, bounds: RankBounds, say: Callable[[str], None]) -> JobPlan | None:
    """Waits for enough slots, and returns the next plan; None if the wait was too long."""
    began, has_told = time.monotonic(), False
    limit = began + bounds.wait_secs
    while True:
        now = time.monotonic()
        plan = available_slots.make_plan(now)
        if plan is not None or now >= limit:
            return plan
        if not has_told and now >= began + _SILENT_SECS:
            has_told = True
            there = sum(available_slots.usable_slots_at(now).values())
            say(f"waiting for {bounds.least} slots, up to {bounds.wait_secs:.0f} s; there are {there}")
        time.sleep(0.1)
