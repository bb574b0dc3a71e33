"""Which of several failures is named, decided on plain records."""

from __future__ import annotations

import signal

import pytest

from npu_run.job.first_failure import (
    SECONDARY_GRACE_SECS,
    SETTLE_SECS,
    InputEnd,
    RankEnding,
    choose_exit_code,
    describe_failure_of_job,
    describe_input_end,
    describe_other_failures,
    find_short_rank,
    first_failure,
    format_ranks,
    is_cause_certain,
)

SECONDARY = RankEnding(rank=0, when=10.0, exit_code=1, summary="UnknownError: shut down", is_secondary=True)
RAISED = RankEnding(rank=1, when=10.5, exit_code=1, summary="ValueError: boom")
KILLED = RankEnding(rank=2, when=10.6, exit_code=137, signal_number=signal.SIGKILL)
ABORTED = RankEnding(rank=3, when=9.0, exit_code=134, signal_number=signal.SIGABRT)
DONE = RankEnding(rank=4, when=9.0, exit_code=0)


def test_nothing_failed():
    assert first_failure([]) is None
    assert first_failure([DONE]) is None
    assert not is_cause_certain([DONE], now=1e9)


@pytest.mark.parametrize(
    ("endings", "cause"),
    [
        ([SECONDARY], SECONDARY),
        ([SECONDARY, RAISED], RAISED),
        ([RAISED, SECONDARY, DONE], RAISED),
        ([ABORTED, RAISED], RAISED),
        ([ABORTED, SECONDARY], ABORTED),
        # The exception came 0.1 s before the death was noticed: it may well be its consequence.
        ([RAISED, KILLED], KILLED),
        ([RAISED._replace(when=KILLED.when - 5), KILLED], RAISED._replace(when=KILLED.when - 5)),
    ],
)
def test_cause(endings, cause):
    assert first_failure(endings) == cause
    assert first_failure(endings[::-1]) == cause


def test_a_cause_is_awaited_while_only_secondary_failures_are_seen():
    assert not is_cause_certain([SECONDARY], now=SECONDARY.when + SECONDARY_GRACE_SECS - 0.01)
    assert is_cause_certain([SECONDARY], now=SECONDARY.when + SECONDARY_GRACE_SECS)
    assert not is_cause_certain([SECONDARY, RAISED], now=RAISED.when)
    assert is_cause_certain([SECONDARY, RAISED], now=RAISED.when + SETTLE_SECS)


def test_description_names_rank_and_end():
    assert describe_failure_of_job(RAISED, [RAISED, SECONDARY], 4) == (
        "rank 1 of 4 ended with ValueError: boom; exit code 1. The other ranks were stopped."
    )


MISMATCH = RAISED._replace(summary="UnknownError: Mismatched data types: One rank had type float32 (in grad_w)")


@pytest.mark.parametrize(
    ("cause", "others", "size", "part"),
    [
        (KILLED, [], 4, "rank 2 of 4 was killed by SIGKILL"),
        (KILLED._replace(signal_number=40), [], 4, "rank 2 of 4 was killed by signal 40"),  # it has no name
        (RankEnding(0, 1.0, 3), [], 2, "ended without an exception; exit code 3"),
        (RAISED._replace(summary="ValueError: wrong. Fix it."), [], 2, "wrong. Fix it; exit code 1."),
        (SECONDARY, [DONE], 5, "Rank 4 had ended normally by then"),
        (SECONDARY, [DONE], 5, "Give all ranks the same number of batches"),
        (SECONDARY, [], 3, "Ranks 1, 2 did not answer: look at what they were doing."),
        (MISMATCH, [], 2, "(in grad_w); exit code 1. The ranks disagree"),
    ],
)
def test_description_says_what_is_known(cause, others, size, part):
    assert part in describe_failure_of_job(cause, [cause, *others], size)


def test_description_stays_one_readable_line():
    assert len(describe_failure_of_job(RAISED._replace(summary="E" * 5000), [], 2)) < 400


GONE = RankEnding(rank=5, when=9.5, exit_code=0, is_unfinished=True)


def test_a_rank_that_was_gone_without_a_word_is_the_cause_of_what_others_noticed():
    assert first_failure([SECONDARY, GONE, DONE]) == GONE
    assert first_failure([ABORTED, GONE]) == GONE
    assert first_failure([GONE]) is None  # a script may end so
    assert first_failure([RAISED, GONE]) == RAISED
    assert is_cause_certain([SECONDARY, GONE], now=GONE.when + SETTLE_SECS)
    assert describe_failure_of_job(GONE, [SECONDARY, GONE], 6) == (
        "rank 5 of 6 was gone before the end of its script, without an exception, as after os._exit(0); exit code "
        "1. The other ranks were stopped."
    )
    assert choose_exit_code(GONE) == 1 and choose_exit_code(RAISED._replace(exit_code=7)) == 7


def test_survivors_have_a_line_each_and_one_where_they_say_the_same():
    shut_down = "UnknownError: Horovod has been shut down. This was caused by one of the ranks. (in grad_w)"
    endings = [
        RAISED,
        DONE,
        SECONDARY._replace(rank=3, summary=shut_down, tensor="grad_w"),
        SECONDARY._replace(rank=0, summary=shut_down, tensor="grad_w"),
        SECONDARY._replace(rank=6, summary="UnknownError: [/a/b/pair.cc:589] Read error. Really."),
        ABORTED._replace(rank=7),
        KILLED._replace(rank=8, signal_number=None, exit_code=255, disconnect_reason="nothing was heard from hostb"),
    ]
    assert describe_other_failures(RAISED, endings) == [
        "ranks 0, 3 ended with UnknownError: Horovod has been shut down (in grad_w) after that",
        "rank 6 ended with UnknownError: Read error after that",
        "rank 7 was killed by SIGABRT after that",
        "rank 8 was lost: nothing was heard from hostb after that",
    ]


@pytest.mark.parametrize(
    ("ranks", "words"),
    [
        ([7], "rank 7"),
        ([1, 2, 3, 7], "ranks 1, 2, 3, 7"),
        ([0, 2, 3, 4, 5, 8], "ranks 0, 2-5, 8"),
        (range(1, 1000), "ranks 1-999"),
        (range(0, 1000, 2), "ranks 0, 2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 22, ... (500 in all)"),
    ],
)
def test_many_ranks_are_named_in_few_words(ranks, words):
    assert format_ranks(ranks) == words


def test_a_thousand_deaths_are_told_in_few_lines():
    killed = [KILLED._replace(rank=rank, when=KILLED.when + rank / 1000) for rank in range(1000)]
    cause = first_failure(killed)
    assert cause == killed[0] and is_cause_certain(killed, cause.when + SETTLE_SECS)
    assert describe_other_failures(cause, killed) == [
        "ranks 1-999 were killed by SIGKILL (by hand, or by the system because memory ran out) after that"
    ]
    raised = [RAISED._replace(rank=rank) for rank in range(1000)]
    assert describe_other_failures(raised[0], raised) == ["ranks 1-999 ended with ValueError: boom after that"]
    differing = [RAISED._replace(rank=rank, summary=f"ValueError: rank {rank}") for rank in range(1000)]
    *_, fifth, rest = lines = describe_other_failures(differing[0], differing)
    assert len(lines) == 6 and fifth == "rank 5 ended with ValueError: rank 5 after that"
    assert rest == "ranks 6-999 failed with other errors after that"
    secondary = [SECONDARY, *(DONE._replace(rank=rank) for rank in range(1, 999))]
    assert "Ranks 1-998 had ended normally by then" in describe_failure_of_job(SECONDARY, secondary, 1000)
    assert len(describe_failure_of_job(SECONDARY, [SECONDARY], 1000)) < 200


OWN_END = RankEnding(rank=1, when=10.5, exit_code=1, summary="OutOfRangeError: End of sequence")
AFTER_37, AFTER_50 = InputEnd(37, False), InputEnd(50, False)


@pytest.mark.parametrize(
    ("cause", "input_ends", "short"),
    [
        (SECONDARY, {1: AFTER_37}, 1),  # it ended well, or is on its way
        (OWN_END, {1: AFTER_37}, 1),
        (SECONDARY, {1: AFTER_50, 2: AFTER_37}, 2),
        (SECONDARY, {}, None),
        (SECONDARY, {0: AFTER_50, 1: AFTER_37}, None),  # a rank that waits has no more input itself
        (OWN_END, {0: AFTER_37, 1: AFTER_37, 2: AFTER_37}, None),  # no rank has more
        (RAISED, {1: AFTER_37}, None),
        (KILLED, {1: AFTER_37}, None),
    ],
)
def test_a_rank_that_runs_out_of_input_is_the_story_when_others_wait_for_it(cause, input_ends, short):
    assert find_short_rank(cause, input_ends, 3) == short


def test_the_end_of_an_input_is_told_with_its_step_and_what_to_do():
    text = describe_input_end(1, {1: AFTER_37}, 3, 1)
    assert text.startswith(
        "rank 1 of 3 came to the end of its input after 37 steps, and ranks 0, 2 continued to step 38, which needs "
        "every rank; exit code 1. Give all ranks the same number of batches"
    )
    assert "EndTogether" in text
    assert str(InputEnd(1, True)) == "was through with model.fit after 1 step"
    assert str(InputEnd(None, False)) == "came to the end of its input"
    assert str(InputEnd(13, False, of_script=True)) == "ended after 13 steps"
