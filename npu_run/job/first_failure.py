"""Finds the rank that failed first, describes its failure, and chooses the exit code of the job.

When a rank fails, the other ranks fail too: their next collective raises an error because a peer is gone. Such failures
are secondary. The rank to report is the first rank with a failure of its own. A secondary failure is reported only if
there are no others.
"""

from __future__ import annotations

import re
import signal
from collections.abc import Mapping, Sequence
from typing import NamedTuple

# How long to look for the cause after seeing only secondary failures.
SECONDARY_GRACE_SECS = 3.0
# How long to wait for reports of failures that happened before the one just seen.
SETTLE_SECS = 0.3
# A death by signal is noticed when the process is collected; an exception is dated when it is raised. So an exception
# can be a consequence of a death that seems to come this much later.
_SIGNAL_LEAD_SECS = 1.0
_SUMMARY_CHARACTERS = 320
# For many ranks: most failures shown, most rank numbers in a sentence, and fewest numbers in a row written as a range.
_MOST_WAYS = 5
_MOST_NUMBERS = 12
_LEAST_IN_A_ROW = 4
_CURE = (
    "Give all ranks the same number of batches (repeat() and a number of steps, say), or end them together: "
    "EndTogether, docs/ranks.md."
)
# The error of a rank whose input has ended.
_NO_INPUT = "OutOfRangeError"
# The location in Gloo's source that raised an error.
_SOURCE = re.compile(r"\[[^\]\s]*\.cc:\d+\] ")


class RankEnding(NamedTuple):
    """The end of one rank.

    Attributes:
      rank: number of the rank.
      when: seconds on the monotonic clock.
      exit_code: exit code as a shell shows it: 128 + signal number after a signal.
      signal_number: the signal that killed the rank, or None.
      summary: the last line of the rank's exception; "" if it reported no exception.
      trace: the rank's traceback, or its last output if it could not report.
      is_secondary: whether the failure only says that another rank is gone.
      tensor: the op that the exception is about, or "".
      is_unfinished: whether the process ended with exit code 0 although its script did not finish.
      disconnect_reason: why the launcher lost the rank, if its host cannot be reached any more; "" if its end is known.
      is_stopped: whether the rank ended after a whole step on request.
    """

    rank: int
    when: float
    exit_code: int
    signal_number: int | None = None
    summary: str = ""
    trace: str = ""
    is_secondary: bool = False
    tensor: str = ""
    disconnect_reason: str = ""
    is_unfinished: bool = False
    is_stopped: bool = False

    @property
    def has_failed(self) -> bool:
        """Whether the rank failed, rather than ended normally or on request."""
        return self.exit_code != 0 and not self.is_stopped

    @property
    def was_killed_or_lost(self) -> bool:
        """Whether the rank was killed (not by SIGABRT: Gloo itself can abort without a peer), or its host is gone."""
        return bool(self.disconnect_reason) or self.signal_number not in (None, signal.SIGABRT)


class InputEnd(NamedTuple):
    """The point at which one rank's input ended.

    Attributes:
      steps: number of steps that the rank had made; None if unknown.
      of_fit: whether the end of the input was seen because `model.fit` returned.
      of_script: whether the script ended without a report about its input.
    """

    steps: int | None
    of_fit: bool
    of_script: bool = False

    def __str__(self) -> str:
        after = "" if self.steps is None else f" after {self.steps} step{'' if self.steps == 1 else 's'}"
        if self.of_script:
            return f"ended{after}"
        return f"was through with model.fit{after}" if self.of_fit else f"came to the end of its input{after}"


def first_failure(endings: list[RankEnding]) -> RankEnding | None:
    """Returns the failure that caused the other failures; None if no rank has failed."""
    failures = [ending for ending in endings if ending.has_failed]
    cause = min(
        failures, key=lambda ending: (is_consequence_of_other_rank(ending), _failure_time(ending)), default=None
    )
    if cause is not None and is_consequence_of_other_rank(cause):
        # The others failed because a rank had ended early without an exception.
        return min((ending for ending in endings if ending.is_unfinished), key=_failure_time, default=cause)
    return cause


def is_cause_certain(endings: list[RankEnding], now: float) -> bool:
    """Returns whether enough time has passed since the first sign of a failure to be sure of its cause."""
    cause = first_failure(endings)
    if cause is None:
        return False
    if not is_consequence_of_other_rank(cause):
        return now >= cause.when + SETTLE_SECS
    return now >= min(ending.when for ending in endings if ending.has_failed) + SECONDARY_GRACE_SECS


def describe_failure_of_job(cause: RankEnding, endings: list[RankEnding], size: int) -> str:
    """Returns a line of text: which rank failed first, how, and the likely cause."""
    text = f"rank {cause.rank} of {size} {_describe_ending(cause)}; exit code {choose_exit_code(cause)}."
    finished = sorted(ending.rank for ending in endings if ending.exit_code == 0)
    if is_consequence_of_other_rank(cause) and finished:
        who = format_ranks(finished).capitalize()
        text += f" {who} had ended normally by then: every rank must take part in the same collectives. {_CURE}"
    elif cause.is_secondary and len(endings) < size:
        silent = sorted(set(range(size)) - {ending.rank for ending in endings})
        they = "it was" if len(silent) == 1 else "they were"
        text += f" {format_ranks(silent).capitalize()} did not answer: look at what {they} doing."
    elif "Mismatched" in cause.summary:
        text += " The ranks disagree: all must build the same variables, with the same shapes and dtypes."
    elif size > 1:
        text += " The other ranks were stopped."
    return text


def find_short_rank(cause: RankEnding, input_ends: Mapping[int, InputEnd], size: int) -> int | None:
    """Returns the rank whose input ended while other ranks continued, if this made the job fail; else None.

    Args:
      cause: the result of `first_failure`.
      input_ends: the ends of input, for the ranks whose input has ended.
      size: number of ranks.
    """
    is_own = cause.rank in input_ends and _NO_INPUT in cause.summary
    if not input_ends or len(input_ends) == size or not (is_own or is_consequence_of_other_rank(cause)):
        return None
    if not is_own and cause.rank in input_ends:
        return None
    return earliest_input_end(input_ends)


def earliest_input_end(input_ends: Mapping[int, InputEnd]) -> int:
    """Returns the rank whose input ended after the fewest steps."""
    return min(input_ends, key=lambda rank: (input_ends[rank].steps or 0, rank))


def describe_input_end(rank: int, input_ends: Mapping[int, InputEnd], size: int, code: int) -> str:
    """Returns a line of text: which rank's input ended, when, which ranks continued, and the cure."""
    others = format_ranks(sorted(set(range(size)) - set(input_ends)))
    steps = input_ends[rank].steps
    where = "another step" if steps is None else f"step {steps + 1}"
    return (
        f"rank {rank} of {size} {input_ends[rank]}, and {others} continued to {where}, which needs every rank; exit "
        f"code {code}. {_CURE}"
    )


def _describe_ending(ending: RankEnding) -> str:
    number = ending.signal_number
    if number is not None:
        by_whom = " (by hand, or by the system because memory ran out)" if number == signal.SIGKILL else ""
        name = signal.Signals(number).name if number in set(signal.Signals) else f"signal {number}"
        return f"was killed by {name}{by_whom}"
    if ending.disconnect_reason:
        return f"was lost: {ending.disconnect_reason}"
    if ending.summary:
        is_short = len(ending.summary) <= _SUMMARY_CHARACTERS
        said = ending.summary.removesuffix(".") if is_short else f"{ending.summary[:_SUMMARY_CHARACTERS]} ..."
        return f"ended with {said}"
    if ending.is_unfinished:
        return "was gone before the end of its script, without an exception, as after os._exit(0)"
    return "ended without an exception"


def choose_exit_code(cause: RankEnding) -> int:
    """Returns the exit code of a job that failed because of a rank: the rank's exit code, or 1 if this is 0."""
    return cause.exit_code or 1


def describe_other_failures(cause: RankEnding, endings: list[RankEnding]) -> list[str]:
    """Returns lines about the other failed ranks: one for each kind of failure, six at most."""
    ranks_by_words: dict[str, list[int]] = {}
    for ending in sorted(endings):
        if ending.rank != cause.rank and ending.has_failed:
            if ending.is_secondary:
                # The rest of Gloo's sentence only guesses at the cause, which the last line names.
                reason, dot, _ = _SOURCE.sub("", ending.summary).partition(". ")
                where = f" (in {ending.tensor})" if dot and ending.tensor else ""
                ending = ending._replace(summary=f"{reason}{where}")
            ranks_by_words.setdefault(_describe_ending(ending), []).append(ending.rank)
    lines = []
    for words, ranks in list(ranks_by_words.items())[:_MOST_WAYS]:
        words = re.sub("^was ", "were ", words) if len(ranks) > 1 else words
        lines.append(f"{format_ranks(ranks)} {words} after that")
    others = sorted(rank for ranks in list(ranks_by_words.values())[_MOST_WAYS:] for rank in ranks)
    return lines + ([f"{format_ranks(others)} failed with other errors after that"] if others else [])


def format_ranks(ranks: Sequence[int]) -> str:
    """Returns sorted ranks as text: consecutive ranks as a range; of very many ranks only the first."""
    rows: list[list[int]] = []
    for rank in ranks:
        if rows and rank == rows[-1][-1] + 1:
            rows[-1].append(rank)
        else:
            rows.append([rank])
    parts: list[str] = []
    for row in rows:
        parts += [f"{row[0]}-{row[-1]}"] if len(row) >= _LEAST_IN_A_ROW else map(str, row)
    if len(parts) > _MOST_NUMBERS:
        parts = [*parts[:_MOST_NUMBERS], f"... ({len(ranks)} in all)"]
    return ("rank " if len(ranks) == 1 else "ranks ") + ", ".join(parts)


def is_consequence_of_other_rank(ending: RankEnding) -> bool:
    """Returns whether a rank failed only because another rank is gone; Gloo may have aborted the process then."""
    return ending.is_secondary or ending.signal_number == signal.SIGABRT


def _failure_time(ending: RankEnding) -> float:
    return ending.when - (_SIGNAL_LEAD_SECS if ending.signal_number is not None else 0.0)
