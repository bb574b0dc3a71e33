"""Runs the ranks of another host: an agent that `npu-run` starts there through ssh.

The agent reads lines of JSON from its input: first the job, then signals for ranks and signs of life. The agent writes
lines of JSON to its output: the ranks' output and reports, their exit codes, and its own signs of life. If the
connection closes or stays silent for too long, the agent kills the ranks. So no ranks survive on a host whose network
fails or whose launcher dies.
"""

from __future__ import annotations

import contextlib
import functools
import json
import os
import select
import signal
import sys
import threading
import time
from collections.abc import Iterator
from typing import Any, Callable

from npu_bridge.base.address import address_towards, find_interface
from npu_bridge.base.environment import MEMORY_FOLDER
from npu_bridge.base.memory_folders import MemoryFolder, make_memory_folder, memory_folder_name
from npu_run.errors import LaunchError
from npu_run.job.limits import FILES_OF_A_RANK, Limit, raise_open_file_limit
from npu_run.job.rank_process import OutputWatch, RankProcess, default_rank_environment, rank_command

LIFE_SIGN_SECS = 1.0
_TICK_SECS = 0.05
_CHUNK_BYTES = 16384


def main() -> None:
    """Runs the ranks of one host until the connection closes."""
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # exit codes of ranks would be 0 where it is ignored
    messages = read_messages()
    job = next(messages, None)
    if job is None:
        return
    count = len(job["ranks"])
    try:
        with raise_open_file_limit(count * FILES_OF_A_RANK, f"{count} ranks") as limit:
            run_job(job, messages, lambda: os._exit(0), limit)
    except LaunchError as error:
        sys.exit(str(error))


def run_job(
    job: dict[str, Any],
    messages: Iterator[dict[str, Any]],
    exit_agent: Callable[[], None],
    open_files: Limit | None = None,
) -> None:
    """Runs the ranks of one job, until the launcher ends it.

    Args:
      job: the launcher's first message.
      messages: the launcher's further messages.
      exit_agent: ends this process; called once the launcher is lost and the ranks are killed.
      open_files: the limit on open files for the ranks.
    """
    signals: list[str] = []
    # A scheduler's signal to all processes of a machine is meant for the ranks, which would inherit an ignored signal.
    # The launcher can be on another machine, and not get the signal.
    signal.signal(signal.SIGTERM, lambda number, frame: signals.append("SIGTERM"))
    environment = _rank_environment(job)
    memory = _open_memory_folder(environment)
    ranks = {}
    for place in job["ranks"]:
        command = functools.partial(rank_command, job["script"], job["arguments"], job["devices"])
        take = functools.partial(_forward_output, place["rank"])
        variables = {**environment, **place["variables"]}
        ranks[place["rank"]] = RankProcess(command, variables, take, open_files=open_files)
    codes: dict[int, int] = {}
    is_over = threading.Event()
    obey = threading.Thread(
        target=_obey_messages, args=(messages, ranks, codes, memory, is_over, exit_agent), daemon=True
    )
    obey.start()
    with contextlib.suppress(ConnectionError):
        _report_ranks(ranks, codes, signals, is_over)
    if not is_over.is_set():
        _kill_ranks(ranks, codes)
    obey.join()
    for process in ranks.values():
        process.close()
    with contextlib.suppress(ConnectionError):
        _write_event(over=True)


def _report_ranks(
    ranks: dict[int, RankProcess], codes: dict[int, int], signals: list[str], is_over: threading.Event
) -> None:
    """Reports the output and the exit codes of ranks, until all ranks have ended and the job is over."""
    watch, numbers = OutputWatch(), {process: rank for rank, process in ranks.items()}
    for process in ranks.values():
        watch.add(process)
    reported_at = 0.0
    while not is_over.is_set() or len(codes) < len(ranks):
        for process in watch.wait_for_news(_TICK_SECS):
            # The launcher must get all output before it learns of the end.
            process.read_remaining_output("stdout", "stderr")
            rank, code = numbers[process], process.poll()
            codes[rank] = code
            _write_event(rank=rank, code=code)
        if signals:
            signals.clear()
            _write_event(received_signal="SIGTERM")
        if time.monotonic() - reported_at >= LIFE_SIGN_SECS:
            reported_at = time.monotonic()
            _write_event(stopped=[rank for rank, process in ranks.items() if process.is_stopped])


def _forward_output(rank: int, channel: str, text: bytes) -> None:
    _write_event(rank=rank, channel=channel, text=text.decode("latin-1"))


def _obey_messages(
    messages: Iterator[dict[str, Any]],
    ranks: dict[int, RankProcess],
    exit_codes: dict[int, int],
    memory_folder: MemoryFolder | None,
    job_end: threading.Event,
    exit_agent: Callable[[], None],
) -> None:
    """Carries out the launcher's messages; then kills the ranks, and calls `exit_agent` if the launcher is lost."""
    goes_on = is_job_over = False
    for message in messages:
        goes_on, is_job_over = message.get("goes_on", goes_on), "over" in message
        if "signal" in message:
            ranks[message["rank"]].send_signal(message["signal"])
        elif "order" in message:
            ranks[message["rank"]].send_order(message["order"])
        elif is_job_over:
            break
    _kill_ranks(ranks, exit_codes)
    if memory_folder is not None:
        memory_folder.close(keeps_files=goes_on)
    if is_job_over:
        job_end.set()
    else:
        exit_agent()


def _open_memory_folder(environment: dict[str, str]) -> MemoryFolder | None:
    """Returns the folder for the job's state in this host's memory; None if the job keeps no state in memory.

    The folder has the same name as the launcher's folder; on the launcher's own machine both are one folder.
    """
    path = environment.get(MEMORY_FOLDER)
    folder = make_memory_folder(memory_folder_name(path)) if path else None
    if folder is not None:
        environment[MEMORY_FOLDER] = folder.path
    return folder


def _kill_ranks(ranks: dict[int, RankProcess], codes: dict[int, int]) -> None:
    """Kills all ranks and the processes that they started, unless every rank has already ended by itself."""
    if len(codes) < len(ranks):
        for process in ranks.values():
            process.send_signal(signal.SIGKILL)


def read_messages() -> Iterator[dict[str, Any]]:
    """Yields the launcher's messages, until the connection ends or is silent for more than the job's `silence_secs`."""
    unread, silence_secs = b"", None
    while select.select([0], [], [], silence_secs)[0]:
        text = b""
        with contextlib.suppress(ConnectionError):
            text = os.read(0, _CHUNK_BYTES)
        if not text:
            return
        *lines, unread = (unread + text).split(b"\n")
        for message in map(json.loads, lines):
            silence_secs = message.get("silence_secs", silence_secs)
            yield message


def _write_event(**event: Any) -> None:
    """Writes an event with the time on this host's clock, which the launcher needs to date the ranks' reports."""
    line = json.dumps({**event, "now": time.monotonic()}).encode() + b"\n"
    while line:
        line = line[os.write(1, line) :]


def _rank_environment(job: dict[str, Any]) -> dict[str, str]:
    """Returns the ranks' environment: defaults, overridden by this host's variables, then by the launcher's."""
    variables = {**default_rank_environment(job.get("sharing", len(job["ranks"]))), **os.environ, **job["environment"]}
    interface = find_interface(address_towards(job["peer"]))
    if interface:
        variables.setdefault("HOROVOD_GLOO_IFACE", interface)
        variables.setdefault("NCCL_SOCKET_IFNAME", interface)
    return variables
