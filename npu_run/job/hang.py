"""Detects hangs: decides, from the calls in which ranks are stuck, that a job cannot continue; names waiting ranks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Callable, NamedTuple

from npu_run.job.first_failure import InputEnd, RankEnding, format_ranks

# The exit code of timeout(1).
HANG_EXIT_CODE = 124
# When to warn about a long wait in a job that will not be ended for it; Horovod's own default.
WARN_SECS = 60.0
# When to end a job in which every rank is idle, if no other limit was given.
IDLE_LIMIT_SECS = 600.0
# When to end a job in which one rank's input has ended, others still train, and all of them wait. A save to a slow disk
# can look like this for some seconds: its rank waits inside TensorFlow, and hardly computes.
SHORT_LIMIT_SECS = 20.0
# How long a process can be stopped while others wait for it. Gloo gives up after 30 s, without naming the process.
STOPPED_LIMIT_SECS = 20.0
_CERTAIN = (
    "They wait in different places, so none can continue. Run the same collectives on every rank, in the same order; "
    "EndTogetherCallback (Keras) or EndTogether ends ranks with unequal numbers of batches together, docs/ranks.md."
)
_CAUSES = (
    "Usual causes: code that only some ranks run, unequal numbers of batches, graphs that differ, or one slow or "
    "stopped rank."
)


class StuckCall(NamedTuple):
    """A call in which a rank's main thread has been for a while.

    Attributes:
      since: start of the call, in seconds on the monotonic clock.
      where: file and line of the script.
      waits: whether the call is inside TensorFlow or Horovod, where a rank waits for other ranks.
      busy_at: when the rank's threads (except Horovod's) were last seen computing during the call, on the same clock.
      pipeline: file and line of the input pipeline, if it is Python code that is running.
      is_blocked: whether the process could not continue for several seconds, because every thread waits for another.
    """

    since: float
    where: str
    waits: bool
    busy_at: float = 0.0
    pipeline: str = ""
    is_blocked: bool = False


class ThreadPosition(NamedTuple):
    """The present position of a rank's main thread, stuck or not; fields as in `StuckCall`."""

    where: str
    pipeline: str = ""


class HangDetector:
    """Decides when to end a job because its ranks would wait for ever.

    Args:
      limit_secs: how long a rank can wait for other ranks; 0 means no limit. None ends the job when every rank has been
        waiting for 600 s without computing.
      warn: called with a sentence, once for each long wait in a job without a limit.
    """

    def __init__(self, limit_secs: float | None, warn: Callable[[str], None]):
        self._limit_secs = limit_secs
        self._warn = warn
        self._warned_of = 0.0
        self._stopped_at: dict[int, float] = {}

    def is_hung(
        self,
        calls: Mapping[int, StuckCall | None],
        stopped_ranks: Sequence[int],
        rank_endings: Sequence[RankEnding],
        now: float,
        input_ends: Mapping[int, InputEnd] | None = None,
    ) -> bool:
        """Returns whether to end the job; call it repeatedly.

        Args:
          calls, stopped_ranks, rank_endings, input_ends: arguments of `describe_hang`.
          now: seconds on the monotonic clock.
        """
        if self._limit_secs != 0 and not rank_endings and is_deadlock(calls, stopped_ranks):
            return True
        since = find_longest_wait_start(calls)
        if since is None:
            self._stopped_at.clear()
            return False
        if not self._limit_secs and now - since >= WARN_SECS and since != self._warned_of:
            self._warned_of = since
            text = describe_hang(calls, rank_endings, stopped_ranks, now - since, input_ends=input_ends)
            until = "" if self._limit_secs == 0 else f" until every rank has been idle for {IDLE_LIMIT_SECS:.0f} s"
            self._warn(f"{text} The job continues{until}; --stall-secs N would end it.")
        if self._limit_secs is None:
            idle = find_start_of_common_wait(calls, stopped_ranks)
            is_over = idle is not None and now - idle >= IDLE_LIMIT_SECS
        else:
            is_over = self._limit_secs > 0 and now - since >= self._limit_secs
        short = find_start_of_wait_with_uneven_input(calls, stopped_ranks, input_ends or {})
        if self._limit_secs != 0 and short is not None:
            is_over |= now - short >= SHORT_LIMIT_SECS
        # A rank that waits for a stopped process waits for ever.
        self._stopped_at = {rank: self._stopped_at.get(rank, now) for rank in stopped_ranks}
        waiting = {rank for rank, call in calls.items() if call is not None and call.waits}
        long_stopped = any(now - when >= STOPPED_LIMIT_SECS for when in self._stopped_at.values())
        return is_over or (self._limit_secs != 0 and long_stopped and bool(waiting.difference(stopped_ranks)))


def find_longest_wait_start(calls: Mapping[int, StuckCall | None]) -> float | None:
    """Returns when the longest wait of a rank inside TensorFlow or Horovod began; None if no rank waits.

    A rank that computes does not wait: a single run can hold many training steps.
    """
    waiting = [call for call in calls.values() if call is not None and call.waits]
    return min((max(call.since, call.busy_at) for call in waiting), default=None)


def find_start_of_common_wait(calls: Mapping[int, StuckCall | None], stopped_ranks: Sequence[int]) -> float | None:
    """Returns the time since which every rank has waited without computing; None if any rank can still continue.

    A rank in a call outside TensorFlow and Horovod, such as a download, can continue. So can a rank that computes: a
    single run can hold hours of training steps.
    """
    since, halted = 0.0, set(stopped_ranks)
    for rank, call in calls.items():
        if rank in halted:
            continue
        if call is None or not call.waits:
            return None
        since = max(since, call.since, call.busy_at)
    return since or None


def is_deadlock(calls: Mapping[int, StuckCall | None], stopped: Sequence[int]) -> bool:
    """Returns whether it is certain that no rank can continue: every process is blocked, and Horovod moves no data."""
    return not stopped and bool(calls) and all(call is not None and call.is_blocked for call in calls.values())


def find_start_of_wait_with_uneven_input(
    calls: Mapping[int, StuckCall | None], stopped_ranks: Sequence[int], input_ends: Mapping[int, InputEnd]
) -> float | None:
    """Returns the time since which all ranks have waited, if the input has ended on some ranks but not on others.

    Returns None if any rank can still continue, because it computes or its input is slow.
    """
    is_behind = {rank in input_ends for rank in calls}
    is_reading = any(call is not None and call.pipeline for call in calls.values())
    return None if is_reading or len(is_behind) < 2 else find_start_of_common_wait(calls, stopped_ranks)


def describe_hang(
    calls: Mapping[int, StuckCall | None],
    rank_endings: Sequence[RankEnding],
    stopped_ranks: Sequence[int],
    secs: float,
    positions: Mapping[int, ThreadPosition | None] | None = None,
    input_ends: Mapping[int, InputEnd] | None = None,
) -> str:
    """Returns a line of text: how long there was no progress, which ranks wait, for what, and which ranks are missing.

    Args:
      calls: the call in which each running rank is stuck; None for a rank that moves or has not reported.
      rank_endings: the ends of ranks that finished, or failed because Horovod was shut down.
      stopped_ranks: ranks whose process is stopped (SIGSTOP, Ctrl-Z, a debugger).
      secs: how long there was no progress.
      positions: the positions of the ranks that answered.
      input_ends: the ends of input, for the ranks whose input has ended.
    """
    ended, halted = {ending.rank: ending for ending in rank_endings}, set(stopped_ranks)
    ranks_by_words: dict[str, list[int]] = {}
    for rank in sorted({*calls, *ended}):
        words = _describe_rank(calls.get(rank), ended.get(rank), rank in halted, (positions or {}).get(rank))
        input_end = (input_ends or {}).get(rank)
        words = words if input_end is None else f"{input_end}, and is {words}"
        ranks_by_words.setdefault(words, []).append(rank)
    parts = [f"{format_ranks(ranks)} {words}" for words, ranks in ranks_by_words.items()]
    cure = _CERTAIN if is_deadlock(calls, stopped_ranks) else _CAUSES
    return f"no progress for {secs:.0f} s: {'; '.join(parts)}. {cure}"


def _describe_rank(
    call: StuckCall | None, ending: RankEnding | None, is_stopped: bool, position: ThreadPosition | None
) -> str:
    if is_stopped:
        return "missing, its process is stopped"
    where = call.where if call is not None else position.where if position is not None else ""
    if where and ending is not None and ending.is_secondary and ending.tensor:
        return f"waiting for {ending.tensor} at {where}"
    pipeline = (call.pipeline if call is not None else "") or (position.pipeline if position is not None else "")
    if pipeline:
        return f"is in its input pipeline ({pipeline})"
    if call is not None and call.waits:
        # Horovod was shut down, and the ranks that waited in it have reported so.
        is_busy = ending is None and call.busy_at > call.since
        return f"missing, it computes inside TensorFlow at {call.where}" if is_busy else f"waiting at {call.where}"
    if call is not None:
        return f"missing, it stays at {call.where}"
    if ending is not None and ending.exit_code == 0:
        return "missing, it has ended"
    return f"missing, it is at {where}" if where else "missing, it is elsewhere"
