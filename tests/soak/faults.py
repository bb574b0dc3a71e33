"""The faults: each harms a running job from outside, and says what has to follow.

Those that last a while and that a training should outlive are context managers, so that two can happen at once.
"""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from random import Random
from typing import Callable, NamedTuple

import psutil

from tests.soak.job import Job

_UNFINISHED = re.compile(r"_temp|tempstate|\.tmp|\.unfinished-.*keras")
_KILLED = r"rank ({}) of \d was killed by SIGKILL"
_NOT_SAVED = re.compile(r"Training continues|No space left on device|Read-only file system|ended with \w+")
_WHY = r"npu-run: (rank \d of \d .*exit code \d|no progress for \d)"  # one may hang as it ends after a clock moved


class Fault(NamedTuple):
    """A fault, and its required consequence.

    Attributes:
      what: for the report.
      at: when it happened, in seconds on the monotonic clock.
      over: since when nothing hinders the training any more.
      restarts: whether the job has to start its ranks anew; None if it may, and then says why.
      says: patterns that the log has to have since.
      may_lose: whether steps may have to be made again.
    """

    what: str
    at: float
    over: float
    restarts: bool | None = True
    says: tuple[str, ...] = ()
    may_lose: bool = True


class Kind(NamedTuple):
    """A kind of fault: how often it is drawn, what it does, and which jobs it can happen to."""

    weight: float
    act: Callable[[Job, Random], Fault]
    homes: tuple[str, ...] = ("plain", "slots", "disk", "clock", "hosts")
    faces: tuple[str, ...] = ("estimator", "session", "keras")


def _now() -> float:
    return time.monotonic()


def _signal(pid: int, number: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, number)


def _kill(job: Job, chance: Random, count: int = 1) -> Fault:
    ranks = job.ranks()
    chosen = sorted(chance.sample(sorted(ranks), min(count, len(ranks))))
    for rank in chosen:
        _signal(ranks[rank], signal.SIGKILL)
    now = _now()
    return Fault(f"ranks {chosen}", now, now, says=(_KILLED.format("|".join(map(str, chosen))),))


def _kill_two(job: Job, chance: Random) -> Fault:
    return _kill(job, chance, 2)


def _kill_again(job: Job, chance: Random) -> Fault:
    old = set(job.ranks().values())
    first = _kill(job, chance)
    job.wait(lambda: set(job.ranks().values()) - old, "the next start")
    time.sleep(chance.uniform(0, 6))
    new = {rank: pid for rank, pid in job.ranks().items() if pid not in old}
    if not new:
        return first
    rank = chance.choice(sorted(new))
    _signal(new[rank], signal.SIGKILL)
    says = (*first.says, rf"(?s)was killed by SIGKILL.*{_KILLED.format(rank)}")
    return Fault(f"{first.what}, then rank {rank}", first.at, _now(), says=says)


def _kill_saving(job: Job, chance: Random) -> Fault:
    pid, limit = job.ranks()[0], _now() + 10
    while (is_late := _now() > limit) is False:
        # No folder before the first checkpoint.
        if os.path.isdir(job.model) and any(map(_UNFINISHED.search, os.listdir(job.model))):
            break
    _signal(pid, signal.SIGKILL)
    now = _now()
    what = "rank 0, which was not seen to save" if is_late else "rank 0"
    return Fault(what, now, now, says=(_KILLED.format(0),))


def _stop_launcher(job: Job, chance: Random) -> Fault:
    now = _now()
    _signal(job.process.pid, signal.SIGTERM)
    return _start_again(job, "the launcher", now, "npu-run: SIGTERM: the ranks end")


def _stop_rank(job: Job, chance: Random) -> Fault:
    ranks = job.ranks()
    rank, now = chance.choice(sorted(ranks)), _now()
    _signal(ranks[rank], signal.SIGTERM)
    return _start_again(job, f"rank {rank}", now, rf"npu-run: SIGTERM \(rank {rank} received it\)")


def _start_again(job: Job, what: str, at: float, says: str) -> Fault:
    job.wait(lambda: job.process.poll() is not None, "an orderly end", may_end=True)
    code = job.process.returncode
    now = _now()
    job.start()
    says_all = (says, r"npu-run: ended after step \d+; exit code 75\.")
    return Fault(f"{what}, exit code {code}", at, now, says=says_all, may_lose=False)


def _tear(job: Job, chance: Random) -> Fault:
    """Resets all TCP connections of a rank, of which it has some to the other ranks and no others that last."""
    ranks = job.ranks()
    rank = chance.choice(sorted(ranks))
    if len(ranks) == 1:
        return _kill(job, chance)
    inside = ["nsenter", f"--net=/proc/{ranks[rank]}/ns/net", "ss"]
    listed = subprocess.run([*inside, "-Htnp", "state", "established"], capture_output=True, text=True, check=True)
    own = [line.split()[2] for line in listed.stdout.splitlines() if f"pid={ranks[rank]}," in line]
    now = _now()
    for address in own:
        words = [*inside, "-K", "sport", "=", address.rpartition(":")[2]]
        subprocess.run(words, capture_output=True, check=False)
    return Fault(f"{len(own)} of rank {rank}", now, now, says=("connections between ranks lost",))


def _step_in_memory(pid: int) -> int:
    """The step of the newest copy in memory of a rank's job; -1 if there is none."""
    variables = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
    folder = next((text.decode().partition("=")[2] for text in variables if text.startswith(b"NPU_RUN_MEMORY")), "")
    names = [path.name.partition("-")[0] for path in Path(folder).glob("*/*-*")] if folder else []
    return max((int(name) for name in names if name.isdecimal()), default=-1)


def _damage(job: Job, chance: Random) -> Fault:
    """Damages the newest of several checkpoints, or their list, between saves; then kills rank 0."""
    job.wait(lambda: len(_steps_saved(job)) > 1, "two checkpoints")
    pid = job.ranks()[0]
    _signal(pid, signal.SIGSTOP)
    newest, in_memory = max(_steps_saved(job)), _step_in_memory(pid)
    of_newest = rf"checkpoint|model\.ckpt-{newest}\.(index|data-.*)"
    path = chance.choice(sorted(path for path in job.model.iterdir() if re.fullmatch(of_newest, path.name)))
    how = chance.choice(["deleted", "truncated", "one bit flipped", "overwritten"])
    text = path.read_bytes()
    place = chance.randrange(len(text))
    path.unlink()
    if how == "truncated":
        path.write_bytes(text[:place])
    elif how != "deleted":
        end = place + 1 if how == "one bit flipped" else len(text)
        path.write_bytes(text[:place] + bytes(byte ^ 16 for byte in text[place:end]) + text[end:])
    _signal(pid, signal.SIGKILL)
    now = _now()
    # A bit can be in an unread part, and half a list is a list; a clock that jumps does not report its loss.
    is_told = how != "one bit flipped" and (path.name != "checkpoint" or (how == "deleted" and job.kind != "clock"))
    is_told = is_told and in_memory <= newest  # a newer copy in memory comes first
    says = (rf"{path.name} is damaged",) if is_told else ()
    return Fault(f"{path.name} {how} at {place} of {len(text)}", now, now, says=(_KILLED.format(0), *says))


def _steps_saved(job: Job) -> list[int]:
    found = (re.fullmatch(r"model\.ckpt-(\d+)\.index", path.name) for path in job.model.iterdir())
    return [int(each[1]) for each in found if each]


def _limit(name: str) -> Callable[[Job, Random], Fault]:
    """No more memory, or no more open files, than a rank has; mostly rank 0, which saves and so needs some."""

    def act(job, chance):
        ranks, at = job.ranks(), _now()
        rank = chance.choice([0, 0, max(ranks)])
        process = psutil.Process(ranks[rank])
        number = getattr(psutil, f"RLIMIT_{name}")
        soft, hard = process.rlimit(number)
        least = process.memory_info().vms if name == "AS" else process.num_fds()
        process.rlimit(number, (least, hard))
        with contextlib.suppress(psutil.NoSuchProcess):
            while process.status() != psutil.STATUS_ZOMBIE and _now() < at + 3:
                time.sleep(0.1)
            process.rlimit(number, (soft, hard))
        return Fault(f"rank {rank}, {least}", at, _now(), None, (_WHY,))

    return act


def _change_slots(job: Job, chance: Random) -> Fault:
    size = len(job.ranks())
    offered = chance.choice([number for number in (1, 2, 3, 4) if number != size])
    job.size, now = max(job.size, offered), _now()
    job.offer(offered)
    if offered < size:
        return Fault(f"{size} to {offered}", now, now + 1, False)
    is_room = offered > size
    return Fault(f"{size} to {offered}", now, now, is_room, ("there are slots for",), may_lose=False)


def _lose_host(job: Job, chance: Random) -> Fault:
    """For good, from the job's point of view; it comes back once the job continues without it."""
    if len(job.wait_until_steady().runs) < 3:
        return _kill(job, chance)
    at, known, size = _now(), len(job.starts()), job.log.stat().st_size
    job.hosts.cut()
    try:
        job.wait(lambda: "nothing was heard from hostb for 20 s" in job.said(size), "the host to be missed")
        job.wait(lambda: len(job.starts()) > known and job.starts()[-1].last[0] > 0, "the job to continue without it")
    finally:
        job.hosts.fix()
    return Fault("hostb", at, _now(), says=(r"rank 2 of 3 was lost: nothing was heard from hostb for 20 s",))


def _lose_packets(job: Job, chance: Random) -> Fault:
    """Takes the link down for a moment again and again, as not every kernel can drop packets at random."""
    at, before = _now(), job.hosts.sent_again()
    while _now() < at + 2:
        job.hosts.cut()
        time.sleep(chance.uniform(0.02, 0.1))
        job.hosts.fix()
        time.sleep(chance.uniform(0.05, 0.3))
    return Fault(f"{job.hosts.sent_again() - before} sent again", at, _now(), False)


@contextlib.contextmanager
def _pausing(job: Job, chance: Random) -> Iterator[list[str]]:
    ranks = job.ranks()
    rank = chance.choice(sorted(ranks))
    _signal(ranks[rank], signal.SIGSTOP)
    yield [f"rank {rank}"]
    _signal(ranks[rank], signal.SIGCONT)


@contextlib.contextmanager
def _moving_clock(job: Job, chance: Random) -> Iterator[list[str]]:
    secs = chance.choice([-1, 1]) * int(10 ** chance.uniform(0, 8))
    job.move_clock(secs)
    yield [f"{secs:+} s"]
    if chance.random() < 0.5:  # back, which is another jump
        job.move_clock(0)


@contextlib.contextmanager
def _cutting(job: Job, chance: Random) -> Iterator[list[str]]:
    job.hosts.cut()
    yield []
    job.hosts.fix()


@contextlib.contextmanager
def _slowing(job: Job, chance: Random) -> Iterator[list[str]]:
    rate = chance.choice(["20kbit", "50kbit", "200kbit"])
    job.hosts.shape("tbf", "rate", rate, "burst", "1600", "latency", "2s")
    yield [rate]
    job.hosts.shape()


@contextlib.contextmanager
def _filling(job: Job, chance: Random) -> Iterator[list[str]]:
    filling = job.model.parent / "filling"
    with open(filling, "ab", buffering=0) as file, contextlib.suppress(OSError):
        while True:
            file.write(bytes(4096))
    yield []
    filling.unlink()


@contextlib.contextmanager
def _read_only(job: Job, chance: Random) -> Iterator[list[str]]:
    """Lays a read-only view of the disk over it: what is open for writing stays so, and nothing else can be written."""
    disk, view = job.model.parent, job.folder / "view"
    view.mkdir(exist_ok=True)
    for words in (["--bind", disk, view], ["-o", "remount,bind,ro", view], ["--bind", view, disk]):
        subprocess.run(["mount", *map(str, words)], check=True)
    subprocess.run(["umount", str(view)], check=True)
    yield []
    subprocess.run(["umount", "-l", str(disk)], check=True)


def _for_a_while(lasts: Callable, least: float, most: float) -> Callable[[Job, Random], Fault]:
    """A fault that the training outlives."""

    def act(job, chance):
        secs, at = least + (most - least) * chance.random() ** 2, _now()  # mostly short
        with lasts(job, chance) as words:
            time.sleep(secs)
        return Fault(", ".join([*words, f"for {secs:.1f} s"]), at, _now(), False)

    return act


def _move_clock(job: Job, chance: Random) -> Fault:
    """Moves the clock: the training continues, or is started again because it waits in vain."""
    fault = _for_a_while(_moving_clock, 0.1, 0.5)(job, chance)
    return fault._replace(restarts=None, says=("no progress for",))


def _until_saving_fails(lasts: Callable) -> Callable[[Job, Random], Fault]:
    """A fault of the disk, which the training outlives, or ends its ranks because of it and says so."""

    def act(job, chance):
        at, size = _now(), job.log.stat().st_size
        with lasts(job, chance):
            while not (said := _NOT_SAVED.search(job.said(size))) and _now() < at + 10:
                time.sleep(0.1)
            time.sleep(chance.uniform(0, 0.5))
        what = f"for {_now() - at:.1f} s, {said[0] if said else 'nothing was saved'}"
        return Fault(what, at, _now(), None, (_WHY,))

    return act


_LASTING = {
    "plain": [_pausing],
    "slots": [_pausing],
    "disk": [_filling, _read_only, _pausing],
    "clock": [_moving_clock, _pausing],
    "hosts": [_cutting, _slowing, _pausing],
}


def _two_at_once(job: Job, chance: Random) -> Fault:
    lasting = chance.choice(_LASTING[job.kind])
    with lasting(job, chance) as words:
        time.sleep(chance.uniform(0, 0.5))
        fault = _kill(job, chance)
        time.sleep(chance.uniform(0, 1))
    return fault._replace(what=", ".join([*words, lasting.__name__.strip("_"), fault.what]), over=_now())


KINDS: dict[str, Kind] = {
    "rank killed": Kind(8, _kill),
    "two ranks killed": Kind(4, _kill_two),
    "killed, and again in recovery": Kind(3, _kill_again),
    "killed while saving": Kind(4, _kill_saving),
    "launcher told to stop": Kind(4, _stop_launcher),
    "rank told to stop": Kind(3, _stop_rank),
    "connections torn": Kind(3, _tear),
    "checkpoint damaged, then killed": Kind(6, _damage, faces=("estimator", "session")),
    "memory limited": Kind(3, _limit("AS")),
    "files limited": Kind(3, _limit("NOFILE")),
    "two at once": Kind(5, _two_at_once),
    "rank paused": Kind(40, _for_a_while(_pausing, 0.2, 3)),
    "slots changed": Kind(20, _change_slots, ("slots",)),
    "disk full": Kind(20, _until_saving_fails(_filling), ("disk",)),
    "disk read-only": Kind(12, _until_saving_fails(_read_only), ("disk",)),
    "clock moved": Kind(80, _move_clock, ("clock",)),
    "link cut for a second": Kind(15, _for_a_while(_cutting, 0.5, 1.5), ("hosts",)),
    "link slow": Kind(15, _for_a_while(_slowing, 1, 2), ("hosts",)),
    "link loses packets": Kind(15, _lose_packets, ("hosts",)),
    "host lost": Kind(1.5, _lose_host, ("hosts",)),
}
