"""Supervises a job: runs a script on N ranks, here and on other hosts, and ends all ranks when one fails.

One thread does everything: it waits for output, reports and ends of ranks, passes output on, and decides. When a rank
fails, the whole job ends; the last output is the rank's traceback and a line that names the rank.
"""

from __future__ import annotations

import contextlib
import functools
import os
import signal
import sys
import time
from collections.abc import Iterator, Sequence
from typing import Callable

from npu_bridge.base.environment import VERBOSE, is_flag_on
from npu_bridge.base.terminal import discard_unwritten_output, escape_controls
from npu_bridge.collective.rendezvous.key_value_server import KeyValueServer
from npu_bridge.session.elastic.stop_request import STOPPED_EXIT_CODE
from npu_run.errors import check_is_main_thread
from npu_run.job.first_failure import (
    SECONDARY_GRACE_SECS,
    InputEnd,
    RankEnding,
    choose_exit_code,
    describe_failure_of_job,
    describe_input_end,
    describe_other_failures,
    earliest_input_end,
    find_short_rank,
    first_failure,
    format_ranks,
    is_cause_certain,
    is_consequence_of_other_rank,
)
from npu_run.job.hang import (
    HANG_EXIT_CODE,
    HangDetector,
    StuckCall,
    describe_hang,
    find_longest_wait_start,
    find_start_of_wait_with_uneven_input,
    is_deadlock,
)
from npu_run.job.hosts import JobPlan
from npu_run.job.limits import Limit, allow_open_files_of_job
from npu_run.job.outcome import Outcome
from npu_run.job.output import TAIL_LINES, JointStream, OutputReaderGoneError, RankLog
from npu_run.job.rank_process import OutputWatch, RankProcess, default_rank_environment, rank_command
from npu_run.job.slots import Slot, connect_slots, find_peer
from npu_run.job.stop_after_step import StopAfterStep
from npu_run.job.watched_rank import WatchedRank
from npu_run.remote.host import RemoteHost, RemoteProcess
from npu_run.remote.tasks import ConnectedTasks

# How long a rank can take to end itself after a polite signal: enough to close files, too short to annoy.
STOP_SECS = 4.0
_TICK_SECS = 0.05
_KILL_TICK_SECS = 0.001
# How long killed ranks can take to end. The system keeps a process that waits for a device or a network disk.
_KILL_SECS = 30.0
# How long the ranks of a deadlock can take to leave Horovod with an exception, also if processes outnumber cores.
_LEAVE_SECS = 10.0
# How often to check for a hang; each check asks the system about every rank.
_HANG_LOOK_SECS = 0.5
_STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


def run_ranks(
    script: str,
    arguments: list[str],
    plan: JobPlan,
    log_dir: str | None = None,
    stall_secs: float | None = None,
    is_out_of_date: Callable[[], str] = lambda: "",
    tasks: ConnectedTasks | None = None,
) -> Outcome:
    """Runs `script` on the ranks of a plan until all ranks have ended.

    Shows the output of rank 0 as it comes, and the output of other ranks line by line after `[rank n] `.

    Args:
      script: a Python file.
      arguments: arguments of the script.
      plan: number of ranks and their hosts.
      log_dir: folder on this machine for a log file of each rank; None writes no logs.
      stall_secs: how long a rank can wait for other ranks before the job is ended; 0 means no limit. None ends the job
        when every rank has been waiting for 600 s without computing.
      is_out_of_date: called periodically; returns why the job should end after a whole step and start again, or "".
      tasks: the tasks of a cluster, each of which runs a rank; None if this process starts all ranks.
    Raises:
      LaunchError: Horovod cannot be imported, ssh is missing, the folder of the logs is unusable, this is not the main
        thread, or a system limit does not allow so many ranks.
    """
    job = _Job(stall_secs, is_out_of_date, tasks)
    connection = connect_slots(plan, tasks)
    with connection as (slots, server), allow_open_files_of_job(slots, log_dir) as limit, job.collecting_signals():
        try:
            job.server, job.open_files = server, limit
            title = f"of {plan.size}: {script}"
            logs = [log_dir and RankLog(log_dir, rank, f"rank {rank} {title}", job.say) for rank in range(plan.size)]
            for host in dict.fromkeys(slot.host for slot in slots):
                own = [slot for slot in slots if slot.host == host]
                start = functools.partial(job.start_remote_ranks, host) if host else job.start_local_ranks
                start(own, script, arguments, plan, logs)
            outcome = job.run()
            lost = tuple(slots[rank].host for rank in job.lost)
            might_still_run = any(host.disconnect_reason for host in job.hosts) or job.has_unkillable_ranks
            has_trained = any(rank.could_stop_after_step for rank in job.ranks)
            outcome = outcome._replace(lost=lost, has_trained=has_trained, might_still_run=might_still_run)
            if lost or outcome.was_torn or outcome.was_resized:
                for host in job.hosts:
                    host.send_message(goes_on=True)  # the host then keeps the state that ranks hold in its memory
        except OutputReaderGoneError as gone:
            discard_unwritten_output(sys.stdout)  # a write at exit would fail, too
            with contextlib.suppress(OutputReaderGoneError):
                job.say(f"the program that reads {gone} has ended; all ranks are stopped")
            outcome = Outcome(128 + signal.SIGPIPE, has_failed=False)
        finally:
            job.close()
        return job.stop_if_signalled(outcome)


class _Job:
    """The running ranks of a job, with the loop that watches them."""

    def __init__(self, stall_secs: float | None, is_out_of_date: Callable[[], str], tasks: ConnectedTasks | None):
        self.server: KeyValueServer | None = None
        self.open_files: Limit | None = None
        self.lost: list[int] = []
        self.has_unkillable_ranks = False
        self._tasks = tasks
        self._is_out_of_date = is_out_of_date
        self._resize = ""
        self._streams = {
            "stdout": JointStream(sys.stdout.buffer, "standard output", self.say, lambda: self._was_signalled),
            "stderr": JointStream(sys.stderr.buffer, "standard error", lambda text: None, lambda: self._was_signalled),
        }
        self._hang_detector = HangDetector(stall_secs, self.say)
        self.ranks: list[WatchedRank] = []
        self.hosts: list[RemoteHost] = []
        self._watch = OutputWatch()
        self._hang_look_at = 0.0
        self._signals: list[int] = []
        self._was_signalled = False
        self._is_told = False
        self._stop_after_step = StopAfterStep(self.ranks)

    def start_local_ranks(
        self, slots: Sequence[Slot], script: str, arguments: list[str], plan: JobPlan, logs: list
    ) -> None:
        """Starts the ranks on this machine."""
        sharing = len(slots) if self._tasks is None else self._tasks.count_sharing_tasks("")
        defaults = {**default_rank_environment(sharing), **os.environ}
        command = functools.partial(rank_command, script, arguments, plan.devices)
        for slot in slots:
            rank = WatchedRank(slot.rank, self._streams, logs[slot.rank])
            variables = {**defaults, **slot.variables}
            rank.process = RankProcess(command, variables, rank.receive, rank.open_channel, self.open_files)
            self.ranks.append(rank)
            self._watch.add(rank.process)

    def start_remote_ranks(self, host: str, slots: Sequence[Slot], script, arguments, plan: JobPlan, logs) -> None:
        """Starts the ranks on another host, or the rank of another cluster task."""
        connect = RemoteHost if self._tasks is None else self._tasks.open_host
        connection = connect(host, self._streams["stderr"])
        self.hosts.append(connection)
        self._watch.add(connection)
        ranks = [WatchedRank(slot.rank, self._streams, logs[slot.rank]) for slot in slots]
        for rank in ranks:
            rank.process = RemoteProcess(rank.rank, connection)
        self.ranks += ranks
        peer = find_peer(plan, host) if self._tasks is None else ""
        connection.start(ranks, [slot.variables for slot in slots], script, arguments, plan.devices, peer)

    @contextlib.contextmanager
    def collecting_signals(self) -> Iterator[None]:
        """Collects stop signals for the loop during a block, so that the signals do not kill the launcher."""
        check_is_main_thread()
        before = {number: signal.getsignal(number) for number in _STOP_SIGNALS}
        # An ignored signal stays ignored: `nohup npu-run` outlives its terminal.
        heeded = [number for number, handler in before.items() if handler != signal.SIG_IGN]
        for number in heeded:
            signal.signal(number, self._store_signal)
        if self._tasks is not None:  # Open MPI's mpirun passes this signal on and waits
            heeded.append(signal.SIGUSR1)
            before[signal.SIGUSR1] = signal.signal(signal.SIGUSR1, lambda *_: self._store_signal(signal.SIGTERM, None))
        try:
            yield
        finally:
            for number in heeded:
                signal.signal(number, before[number])

    def run(self) -> Outcome:
        """Watches until all ranks have ended, one has failed, they hang, or a signal arrives; returns the outcome."""
        while not self._must_stop_at_once():
            endings = self._wait_for_output()
            if is_cause_certain(endings, time.monotonic()):
                break
            if len(endings) == len(self.ranks) and not first_failure(endings):
                self._read_remaining_output_of_ranks()
                self._report_refused_requests()
                return self._report_stop() if any(ending.is_stopped for ending in endings) else Outcome(0, False)
            is_leaving = self._stop_after_step.is_stop_announced
            if (is_leaving or len(self.ranks) > 1) and not first_failure(endings) and self._is_hung(endings):
                code = self._end_hung_job()
                # The ranks have made all requested steps; the next start resumes from their checkpoint.
                return self._report_stop() if is_leaving else Outcome(code, has_failed=True)
        else:
            return self._stop_early()
        cause = first_failure(endings)
        self.lost = [ending.rank for ending in endings if ending.was_killed_or_lost]
        self._stop_ranks(signal.SIGTERM)
        was_torn = is_consequence_of_other_rank(cause)
        return Outcome(self._report_failure(cause, endings), has_failed=True, was_torn=was_torn)

    def _must_stop_at_once(self) -> bool:
        """Returns whether a signal must stop the ranks at once. A first SIGTERM, or a resize of the job, only asks the
        ranks to end after the current step; a first SIGTERM during the resize makes the job end after that step."""
        can_ask = not self._stop_after_step.is_asked and self._stop_after_step.is_stop_possible
        if can_ask or self._resize:
            told = [rank.rank for rank in self.ranks if rank.received_signal]
            if self._signals == [signal.SIGTERM] or (told and not self._signals):
                self._is_told = not self._signals
                by = f" (rank {told[0]} received it)" if self._is_told else ""
                self._resize = ""
                self._signals.clear()
                self.say(f"SIGTERM{by}: the ranks end after this step and save; a second signal stops them at once")
                self._stop_after_step.request_stop(time.monotonic())
            elif can_ask and not self._signals:
                self._resize = self._is_out_of_date()
                if self._resize:
                    self.say(f"{self._resize}; the ranks end after this step and save")
                    self._stop_after_step.request_stop(time.monotonic())
        if not self._stop_after_step.announce_if_ready(time.monotonic()):
            self.say(f"{format_ranks([rank.rank for rank in self.ranks if rank.begun is None])} did not answer")
            return True
        return bool(self._signals)

    def _report_stop(self) -> Outcome:
        if not self._resize:
            told = (f" after step {rank.stopped_after}" for rank in self.ranks if rank.stopped_after is not None)
            self.say(f"ended{next(told, '')}; exit code {STOPPED_EXIT_CODE}. The same command resumes from there.")
        return Outcome(STOPPED_EXIT_CODE, has_failed=False, was_resized=bool(self._resize))

    def stop_if_signalled(self, outcome: Outcome) -> Outcome:
        """Returns an outcome that does not start the job again, if a signal came while the ranks were being ended."""
        if self._signals and (outcome.has_failed or outcome.was_resized):
            name = signal.Signals(self._signals[-1]).name
            self.say(f"{name} came while the ranks were ended: the job does not start again")
            return outcome._replace(has_failed=False, was_resized=False)
        return outcome

    def close(self) -> None:
        """Ends all processes and closes all files."""
        self.kill()
        self._watch.close()
        for rank in self.ranks:
            rank.close()
        for host in self.hosts:
            host.close()

    def kill(self) -> None:
        """Kills all ranks, and the processes that a failed or stopped rank has left behind."""
        if all(rank.ending and rank.ending.exit_code == 0 for rank in self.ranks):
            return
        for rank in self.ranks:
            rank.process.send_signal(signal.SIGKILL)
        limit = time.monotonic() + (0.0 if self.has_unkillable_ranks else _KILL_SECS)
        while (left := [rank.rank for rank in self.ranks if rank.is_running]) and time.monotonic() < limit:
            # Their last output is passed on while the reader is there.
            with contextlib.suppress(OutputReaderGoneError):
                self._wait_for_output(_KILL_TICK_SECS)
        if left and not self.has_unkillable_ranks:
            self.has_unkillable_ranks = True
            with contextlib.suppress(OutputReaderGoneError):
                self.say(f"{format_ranks(left)}: no end is known {_KILL_SECS:.0f} s after SIGKILL")

    def _wait_for_output(self, tick_secs: float = _TICK_SECS) -> list[RankEnding]:
        """Waits a moment for output, passes it on, and returns the ranks that have ended."""
        self._watch.wait_for_news(tick_secs)
        return [ending for ending in (rank.poll() for rank in self.ranks) if ending is not None]

    def _is_hung(self, endings: list[RankEnding]) -> bool:
        now = time.monotonic()
        if now < self._hang_look_at:
            return False
        self._hang_look_at = now + _HANG_LOOK_SECS
        calls = self._stuck_calls()
        stopped = self._stopped_ranks() if any(calls.values()) else []
        return self._hang_detector.is_hung(calls, stopped, endings, now, self._input_ends())

    def _end_hung_job(self) -> int:
        """Ends a job that hangs, and describes the hang by the exceptions of waiting ranks, which name the tensors."""
        calls, stopped, input_ends = self._stuck_calls(), self._stopped_ranks(), self._input_ends()
        certain = is_deadlock(calls, stopped) and len(calls) == len(self.ranks)
        short = ""
        if find_start_of_wait_with_uneven_input(calls, stopped, input_ends) is not None:
            short = describe_input_end(earliest_input_end(input_ends), input_ends, len(self.ranks), 1)
            if not certain:
                self._stop_ranks(signal.SIGTERM)
                self.say(short)
                return 1
        now = time.monotonic()
        secs = now - (find_longest_wait_start(calls) or now)
        for rank in self.ranks:
            rank.process.send_order("leave")
        waiting = {rank for rank, call in calls.items() if call is None or call.waits}
        # Horovod cannot be shut down while a rank's process is stopped.
        limit = time.monotonic() + (0.0 if stopped else _LEAVE_SECS if certain else SECONDARY_GRACE_SECS)
        endings = self._wait_for_output()
        while waiting - {ending.rank for ending in endings} and time.monotonic() < limit:
            endings = self._wait_for_output()
        self._stop_ranks(signal.SIGTERM)
        positions = {rank.rank: rank.position for rank in self.ranks}
        text = describe_hang(calls, endings, stopped, secs, positions, self._input_ends())
        self._report_refused_requests()
        self.say(f"{text} {f'Likely cause: {short}' if short else 'All ranks were stopped.'}")
        return 1 if certain else HANG_EXIT_CODE

    def _stuck_calls(self) -> dict[int, StuckCall | None]:
        return {rank.rank: rank.stuck for rank in self.ranks if rank.is_running}

    def _input_ends(self) -> dict[int, InputEnd]:
        return {rank.rank: rank.input_end for rank in self.ranks if rank.input_end is not None}

    def _stopped_ranks(self) -> list[int]:
        return [rank.rank for rank in self.ranks if rank.is_running and rank.process.is_stopped]

    def _stop_early(self) -> Outcome:
        """Stops the ranks after a signal, or because they did not answer; without a signal, a resize continues."""
        if self._resize and not self._signals:
            self._stop_ranks(signal.SIGTERM)
            if not self._signals:
                return self._report_stop()
        number = self._signals[0] if self._signals else signal.SIGTERM
        name = signal.Signals(number).name
        self.say(f"{name}, stopping {len(self.ranks)} ranks")
        self._stop_ranks(number)
        self._report_refused_requests()
        self.say(f"stopped by {name}; exit code {128 + number}. All ranks were stopped.")
        return Outcome(128 + number, has_failed=False)

    def _stop_ranks(self, number: int) -> None:
        """Sends the ranks a signal to end, kills ranks that do not end, and passes on their last output."""
        already = len(self._signals)
        for rank in self.ranks:
            if rank.is_running and rank.can_stop_after_step and number == signal.SIGTERM:
                rank.process.send_order("end")  # the rank would take the signal for a request to stop after a step
            elif rank.is_running:
                rank.process.send_signal(number)
        limit = time.monotonic() + STOP_SECS
        # A second signal from the user ends the wait.
        while any(rank.is_running for rank in self.ranks) and len(self._signals) == already:
            self._wait_for_output()
            if time.monotonic() >= limit:
                break
        self.kill()
        self._read_remaining_output_of_ranks()

    def _read_remaining_output_of_ranks(self) -> None:
        for rank in self.ranks:
            rank.read_remaining_output()

    def _report_failure(self, cause: RankEnding, endings: list[RankEnding]) -> int:
        input_ends, size = self._input_ends(), len(self.ranks)
        # Secondary failures are expected, and shown only if verbose.
        told = [ending for ending in endings if is_flag_on(VERBOSE) or not ending.is_secondary]
        short = find_short_rank(cause, input_ends, size)
        # If a rank's input ended early, the other ranks did nothing wrong at the places of their exceptions.
        for line in describe_other_failures(cause if short is None else cause._replace(rank=short), told):
            self.say(line)
        if short is not None:
            self.say(describe_input_end(short, input_ends, size, choose_exit_code(cause)))
            return choose_exit_code(cause)
        lines = cause.trace.splitlines()[0 if is_flag_on(VERBOSE) else -TAIL_LINES :]
        if lines:
            self.say("\n".join([f"{'traceback' if cause.summary else 'last output'} of rank {cause.rank}:", *lines]))
        self._report_refused_requests()
        self.say(describe_failure_of_job(cause, endings, len(self.ranks)))
        return choose_exit_code(cause)

    def _report_refused_requests(self) -> None:
        count = self.server.refused if self.server is not None else 0
        if count:
            self.say(f"{count} request(s) at the rendezvous server without this job's secret were refused")

    def say(self, text: str) -> None:
        """Prints a text on a new line, even if a rank was stopped in the middle of a line."""
        self._streams["stderr"].write_line(escape_controls(f"npu-run: {text}").encode())

    def _store_signal(self, number: int, frame: object) -> None:
        self._was_signalled = True
        if self._is_told and number == signal.SIGTERM:
            self._is_told = False  # a scheduler signals all processes, and another one got the signal first
        else:
            self._signals.append(number)
