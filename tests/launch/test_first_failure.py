"""Which of several failures is named, decided on plain records."""

from __future__ import annotations

import signal

import pytest

from npu_bridge.launch.first_failure import (
    ECHO_GRACE_SECS,
    SETTLE_SECS,
    Ending,
    describe,
    first_failure,
    is_decided,
)

ECHO = Ending(rank=0, when=10.0, exit_code=1, summary="UnknownError: shut down", is_echo=True)
RAISED = Ending(rank=1, when=10.5, exit_code=1, summary="ValueError: boom")
KILLED = Ending(rank=2, when=10.6, exit_code=137, signal_number=signal.SIGKILL)
ABORTED = Ending(rank=3, when=9.0, exit_code=134, signal_number=signal.SIGABRT)
DONE = Ending(rank=4, when=9.0, exit_code=0)


def test_nothing_failed():
    assert first_failure([]) is None
    assert first_failure([DONE]) is None
    assert not is_decided([DONE], now=1e9)


@pytest.mark.parametrize(
    ("endings", "cause"),
    [
        ([ECHO], ECHO),
        ([ECHO, RAISED], RAISED),
        ([RAISED, ECHO, DONE], RAISED),
        ([ABORTED, RAISED], RAISED),
        ([ABORTED, ECHO], ABORTED),
        # The exception came 0.1 s before the death was noticed: it may well be its consequence.
        ([RAISED, KILLED], KILLED),
        ([RAISED._replace(when=KILLED.when - 5), KILLED], RAISED._replace(when=KILLED.when - 5)),
    ],
)
def test_cause(endings, cause):
    assert first_failure(endings) == cause
    assert first_failure(endings[::-1]) == cause


def test_a_cause_is_awaited_while_only_echoes_are_seen():
    assert not is_decided([ECHO], now=ECHO.when + ECHO_GRACE_SECS - 0.01)
    assert is_decided([ECHO], now=ECHO.when + ECHO_GRACE_SECS)
    assert not is_decided([ECHO, RAISED], now=RAISED.when)
    assert is_decided([ECHO, RAISED], now=RAISED.when + SETTLE_SECS)


def test_description_names_rank_and_end():
    assert describe(RAISED, [RAISED, ECHO], 4) == (
        "rank 1 of 4 ended with ValueError: boom; exit code 1. The other ranks were stopped."
    )
    assert "rank 2 of 4 was killed by SIGKILL" in describe(KILLED, [KILLED], 4)
    assert "ended without an exception; exit code 3" in describe(Ending(0, 1.0, 3), [], 2)


def test_a_reason_that_is_a_sentence_ends_once():
    sentence = RAISED._replace(summary="ValueError: wrong. Mend it.")
    assert "wrong. Mend it; exit code 1." in describe(sentence, [sentence], 2)


def test_description_of_an_echo_names_the_ranks_that_had_finished():
    assert "Rank 4 had ended normally by then" in describe(ECHO, [ECHO, DONE], 5)


def test_description_of_an_echo_names_the_ranks_that_are_silent():
    assert "Rank 1, 2 did not answer" in describe(ECHO, [ECHO], 3)


def test_description_of_ranks_that_disagree():
    mismatch = RAISED._replace(summary="UnknownError: Mismatched data types: One rank had type float32 (in grad_w)")
    assert "(in grad_w); exit code 1. The ranks disagree" in describe(mismatch, [mismatch], 2)


def test_description_stays_one_readable_line():
    assert len(describe(RAISED._replace(summary="E" * 5000), [], 2)) < 400
