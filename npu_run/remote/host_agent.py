"""Runs the ranks of another host: `npu-run` starts this agent there through ssh, and it passes on their output.

It reads lines of JSON from its input: first the job, then signals for ranks and signs of life. It writes lines of JSON
to its output: what ranks print and report, how they end, and its own signs of life. It kills the ranks when the
connection closes or stays silent for too long. So a host that is cut off, or whose launcher dies, cleans up by itself.
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

from npu_bridge.base.environment import MEMORY_FOLDER
from npu_bridge.base.memory_folders import MemoryFolder, make_memory_folder, name_of
from npu_run.errors import LaunchError
from npu_run.job.limits import FILES_OF_A_RANK, Limit, allow_open_files
from npu_run.job.rank_process import RankProcess, Watch, rank_command, rank_defaults
from npu_run.remote.address import address_towards, find_interface

LIFE_SIGN_SECS = 1.0
_TICK_SECS = 0.05
_CHUNK_BYTES = 16384


def main() -> None:
    """Runs the ranks of one host until the connection closes."""
    messages = read_messages()
    job = next(messages, None)
    if job is None:
        return
    count = len(job["ranks"])
    try:
        with allow_open_files(count * FILES_OF_A_RANK, f"{count} ranks") as limit:
            run_job(job, messages, lambda: os._exit(0), limit)
    except LaunchError as error:
        sys.exit(str(error))


def run_job(
    job: dict[str, Any],
    messages: Iterator[dict[str, Any]],
    leave: Callable[[], None],
    open_files: Limit | None = None,
) -> None:
    """Runs the ranks of one job, until the launcher ends it.

    Args:
      job: the launcher's first message.
      messages: the messages after it.
      leave: called after the last message, when the ranks were killed; ends this process.
      open_files: the limit on open files that ranks get.
    """
    told: list[str] = []
    # A scheduler's signal to all processes of a machine is meant for the ranks, which would inherit an ignored signal.
    # The launcher can be on another machine, and not get the signal.
    signal.signal(signal.SIGTERM, lambda number, frame: told.append("SIGTERM"))
    environment = _environment(job)
    memory = _take_memory(environment)
    ranks = {}
    for place in job["ranks"]:
        command = functools.partial(rank_command, job["script"], job["arguments"], job["devices"])
        take = functools.partial(_pass_on, place["rank"])
        variables = {**environment, **place["variables"]}
        ranks[place["rank"]] = RankProcess(command, variables, take, open_files=open_files)
    codes: dict[int, int] = {}
    is_over = threading.Event()
    obey = threading.Thread(target=_obey, args=(messages, ranks, codes, memory, is_over, leave), daemon=True)
    obey.start()
    with contextlib.suppress(ConnectionError):
        _watch(ranks, codes, told, is_over)
    if not is_over.is_set():
        _end(ranks, codes)
    obey.join()
    for process in ranks.values():
        process.close()
    with contextlib.suppress(ConnectionError):
        _tell(over=True)


def _watch(ranks: dict[int, RankProcess], codes: dict[int, int], told: list[str], is_over: threading.Event) -> None:
    """Passes on the output and the ends of ranks, until all have ended and the job is over."""
    watch, numbers = Watch(), {process: rank for rank, process in ranks.items()}
    for process in ranks.values():
        watch.add(process)
    told_at = 0.0
    while not is_over.is_set() or len(codes) < len(ranks):
        for process in watch.turn(_TICK_SECS):
            process.drain("stdout", "stderr")  # the launcher must get all output before it learns of the end
            rank, code = numbers[process], process.poll()
            codes[rank] = code
            _tell(rank=rank, code=code)
        if told:
            told.clear()
            _tell(was_told="SIGTERM")
        if time.monotonic() - told_at >= LIFE_SIGN_SECS:
            told_at = time.monotonic()
            _tell(stopped=[rank for rank, process in ranks.items() if process.is_stopped])


def _pass_on(rank: int, channel: str, text: bytes) -> None:
    _tell(rank=rank, channel=channel, text=text.decode("latin-1"))


def _obey(
    messages: Iterator[dict[str, Any]],
    ranks: dict[int, RankProcess],
    codes: dict[int, int],
    memory: MemoryFolder | None,
    is_over: threading.Event,
    leave: Callable[[], None],
) -> None:
    """Follows the launcher's messages; after the last one, kills the ranks and ends this process."""
    goes_on = is_told = False
    for message in messages:
        goes_on, is_told = message.get("goes_on", goes_on), "over" in message
        if "signal" in message:
            ranks[message["rank"]].send_signal(message["signal"])
        elif "order" in message:
            ranks[message["rank"]].ask(message["order"])
        elif is_told:
            break
    _end(ranks, codes)
    if memory is not None:
        memory.close(keeps=goes_on)
    if is_told:
        is_over.set()
    else:
        leave()


def _take_memory(environment: dict[str, str]) -> MemoryFolder | None:
    """Returns the folder for the job's state in this host's memory, or None if the job keeps none.

    It has the same name as the launcher's folder; on the launcher's own machine it is that folder.
    """
    path = environment.get(MEMORY_FOLDER)
    folder = make_memory_folder(name_of(path)) if path else None
    if folder is not None:
        environment[MEMORY_FOLDER] = folder.path
    return folder


def _end(ranks: dict[int, RankProcess], codes: dict[int, int]) -> None:
    """Kills all running ranks; does not touch processes that they started if all ended by themselves."""
    if len(codes) < len(ranks):
        for process in ranks.values():
            process.send_signal(signal.SIGKILL)


def read_messages() -> Iterator[dict[str, Any]]:
    """Yields the launcher's messages, until the connection ends or is silent for longer than the job allows."""
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


def _tell(**event: Any) -> None:
    """Writes one line, with this host's clock, against which the ranks' reports are dated."""
    line = json.dumps({**event, "now": time.monotonic()}).encode() + b"\n"
    while line:
        line = line[os.write(1, line) :]


def _environment(job: dict[str, Any]) -> dict[str, str]:
    """Returns the environment of ranks: our defaults, overridden by this host's, overridden by the launcher's."""
    variables = {**rank_defaults(job.get("sharing", len(job["ranks"]))), **os.environ, **job["environment"]}
    interface = find_interface(address_towards(job["peer"]))
    if interface:
        variables.setdefault("HOROVOD_GLOO_IFACE", interface)
        variables.setdefault("NCCL_SOCKET_IFNAME", interface)
    return variables


if __name__ == "__main__":
    main()
