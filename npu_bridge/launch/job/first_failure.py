"""Which rank failed first, and the sentences about it: failures of a rank's own come before secondary failures.

When one rank fails, the others fail too: their next collective raises because a peer is gone. Those failures are
secondary. The rank to name is the first one that failed by itself; a secondary failure is named only when nothing
else turns up.
"""

from __future__ import annotations

import re
import signal
from collections.abc import Mapping, Sequence
from typing import NamedTuple

__all__ = [
    "SECONDARY_GRACE_SECS",
    "SETTLE_SECS",
    "Ending",
    "InputEnd",
    "describe",
    "describe_short",
    "describe_survivors",
    "choose_exit_code",
    "first_failure",
    "first_short",
    "is_consequence",
    "is_decided",
    "name_ranks",
    "ran_short",
]

# How long to go on looking for the cause when so far only secondary failures were seen.
SECONDARY_GRACE_SECS = 3.0
# How long to wait for a failure that happened earlier but is noticed later than the one just seen.
SETTLE_SECS = 0.3
# A death by signal is noticed when the process is collected, an exception is dated when it is raised: an
# exception up to this much earlier may already be the consequence of the death.
_SIGNAL_LEAD_SECS = 1.0
_SUMMARY_CHARACTERS = 320
# Of many ranks, how many ways to fail are told, how many numbers stand in a sentence, and from when on as first-last.
_MOST_WAYS = 5
_MOST_NUMBERS = 12
_LEAST_IN_A_ROW = 4
_CURE = (
    "Give all ranks the same number of batches (repeat() and a number of steps, say), or end them together: "
    "EndTogether, docs/ranks.md."
)
# The error of a rank that asks for a batch when there is none.
_NO_INPUT = "OutOfRangeError"
# Where in Gloo's own source an error was raised.
_SOURCE = re.compile(r"\[[^\]\s]*\.cc:\d+\] ")


class Ending(NamedTuple):
    """How one rank ended.

    Attributes:
      rank: its number.
      when: seconds on the monotonic clock.
      exit_code: what the shell would show: 128 + signal number after a signal.
      signal_number: the signal that killed it, or None.
      summary: the last line of its exception, or "" when it reported none.
      trace: its traceback, or its last output when it could not report.
      is_secondary: the failure only says that another rank is gone.
      tensor: the op its exception is about, or "".
      is_unfinished: the process is gone with exit code 0, and its script had not come to its end.
      loss: why nobody knows how it ended: its host cannot be reached any more. "" when it is known.
      is_stopped: it has ended after a whole step because it was asked to.
    """

    rank: int
    when: float
    exit_code: int
    signal_number: int | None = None
    summary: str = ""
    trace: str = ""
    is_secondary: bool = False
    tensor: str = ""
    loss: str = ""
    is_unfinished: bool = False
    is_stopped: bool = False

    @property
    def has_failed(self) -> bool:
        """Whether it has ended neither well nor because it was asked to."""
        return self.exit_code != 0 and not self.is_stopped

    @property
    def is_lost(self) -> bool:
        """Whether it was killed from outside, or its host is gone; Gloo may abort a process whose peer is gone."""
        return bool(self.loss) or self.signal_number not in (None, signal.SIGABRT)


class InputEnd(NamedTuple):
    """Where the training of one rank came to the end of its input.

    Attributes:
      steps: how many steps it had made by then; None where nobody knows.
      of_fit: it was `model.fit` that was over.
      of_script: it was the script that ended, without a word of its input.
    """

    steps: int | None
    of_fit: bool
    of_script: bool = False

    def __str__(self) -> str:
        after = "" if self.steps is None else f" after {self.steps} step{'' if self.steps == 1 else 's'}"
        if self.of_script:
            return f"ended{after}"
        return f"was through with model.fit{after}" if self.of_fit else f"came to the end of its input{after}"


def first_failure(endings: list[Ending]) -> Ending | None:
    """The failure that caused the others; None when no rank has failed."""
    failures = [ending for ending in endings if ending.has_failed]
    cause = min(failures, key=lambda ending: (is_consequence(ending), _happened(ending)), default=None)
    if cause is not None and is_consequence(cause):
        # A rank that was gone by then without a word is what the others have noticed.
        return min((ending for ending in endings if ending.is_unfinished), key=_happened, default=cause)
    return cause


def is_decided(endings: list[Ending], now: float) -> bool:
    """Whether enough time has passed since the first sign of failure to name its cause."""
    cause = first_failure(endings)
    if cause is None:
        return False
    if not is_consequence(cause):
        return now >= cause.when + SETTLE_SECS
    return now >= min(ending.when for ending in endings if ending.has_failed) + SECONDARY_GRACE_SECS


def describe(cause: Ending, endings: list[Ending], size: int) -> str:
    """One line: which rank failed first, how, and what may be behind it."""
    text = f"rank {cause.rank} of {size} {_how(cause)}; exit code {choose_exit_code(cause)}."
    finished = sorted(ending.rank for ending in endings if ending.exit_code == 0)
    if is_consequence(cause) and finished:
        who = name_ranks(finished).capitalize()
        text += f" {who} had ended normally by then: every rank must take part in the same collectives. {_CURE}"
    elif cause.is_secondary and len(endings) < size:
        silent = sorted(set(range(size)) - {ending.rank for ending in endings})
        they = "it was" if len(silent) == 1 else "they were"
        text += f" {name_ranks(silent).capitalize()} did not answer: look at what {they} doing."
    elif "Mismatched" in cause.summary:
        text += " The ranks disagree: all must build the same variables, with the same shapes and dtypes."
    elif size > 1:
        text += " The other ranks were stopped."
    return text


def ran_short(cause: Ending, input_ends: Mapping[int, InputEnd], size: int) -> int | None:
    """The rank whose input had ended while others went on, if that is why the job failed; else None.

    Args:
      cause: what `first_failure` gives: a rank that waited for one that was gone, or the one that had no input.
      input_ends: of the ranks that had come to the end of their input.
      size: number of ranks.
    """
    is_own = cause.rank in input_ends and _NO_INPUT in cause.summary
    if not input_ends or len(input_ends) == size or not (is_own or is_consequence(cause)):
        return None
    if not is_own and cause.rank in input_ends:
        return None
    return first_short(input_ends)


def first_short(input_ends: Mapping[int, InputEnd]) -> int:
    """The rank whose input ended after the fewest steps."""
    return min(input_ends, key=lambda rank: (input_ends[rank].steps or 0, rank))


def describe_short(rank: int, input_ends: Mapping[int, InputEnd], size: int, code: int) -> str:
    """One line: which rank came to the end of its input, when, who went on, and what to do."""
    others = name_ranks(sorted(set(range(size)) - set(input_ends)))
    steps = input_ends[rank].steps
    where = "another step" if steps is None else f"step {steps + 1}"
    return (
        f"rank {rank} of {size} {input_ends[rank]}, and {others} went on to {where}, which needs every rank; exit code "
        f"{code}. {_CURE}"
    )


def _how(ending: Ending) -> str:
    if ending.signal_number is not None:
        by_whom = (
            " (by hand, or by the system because memory ran out)" if ending.signal_number == signal.SIGKILL else ""
        )
        return f"was killed by {signal.Signals(ending.signal_number).name}{by_whom}"
    if ending.loss:
        return f"was lost: {ending.loss}"
    if ending.summary:
        is_short = len(ending.summary) <= _SUMMARY_CHARACTERS
        said = ending.summary.removesuffix(".") if is_short else f"{ending.summary[:_SUMMARY_CHARACTERS]} ..."
        return f"ended with {said}"
    if ending.is_unfinished:
        return "was gone before its script came to its end, without an exception, as after os._exit(0)"
    return "ended without an exception"


def choose_exit_code(cause: Ending) -> int:
    """The exit code of a job that failed because of a rank: the rank's own, if that is not 0."""
    return cause.exit_code or 1


def describe_survivors(cause: Ending, endings: list[Ending]) -> list[str]:
    """A line for the other ranks that have failed by themselves, those that say the same in one; at most six lines."""
    ranks_by_words: dict[str, list[int]] = {}
    for ending in sorted(endings):
        if ending.rank != cause.rank and ending.has_failed:
            if ending.is_secondary:
                # The rest of such a sentence guesses at what the last line knows.
                reason, dot, _ = _SOURCE.sub("", ending.summary).partition(". ")
                where = f" (in {ending.tensor})" if dot and ending.tensor else ""
                ending = ending._replace(summary=f"{reason}{where}")
            ranks_by_words.setdefault(_how(ending), []).append(ending.rank)
    lines = []
    for words, ranks in list(ranks_by_words.items())[:_MOST_WAYS]:
        words = re.sub("^was ", "were ", words) if len(ranks) > 1 else words
        lines.append(f"{name_ranks(ranks)} {words} after that")
    others = sorted(rank for ranks in list(ranks_by_words.values())[_MOST_WAYS:] for rank in ranks)
    return lines + ([f"{name_ranks(others)} failed in other words after that"] if others else [])


def name_ranks(ranks: Sequence[int]) -> str:
    """Ranks, in ascending order, in words: of many in a row the first and the last one, of many others some."""
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


def is_consequence(ending: Ending) -> bool:
    """Whether a rank has only noticed that another one is gone; Gloo may abort a process then."""
    return ending.is_secondary or ending.signal_number == signal.SIGABRT


def _happened(ending: Ending) -> float:
    return ending.when - (_SIGNAL_LEAD_SECS if ending.signal_number is not None else 0.0)
