"""Describes how a job ended, for those who start it again."""

from __future__ import annotations

from typing import NamedTuple


class Outcome(NamedTuple):
    """The end of a job.

    Attributes:
      exit_code: 0 if every rank ended with 0; the code of the rank that failed first (128 + signal number after a
        signal); 124 after a hang; 75 if all ranks ended after a whole step on request, or for a resize; 128 + signal
        number if the launcher got a signal and the ranks could not end after a step.
      has_failed: whether the job ended by itself, with a failure.
      lost: the host ("" for this machine) of each rank that was killed or cannot be reached; ranks that the launcher
        has stopped do not count.
      was_torn: whether a broken connection between ranks ended the job, and no rank failed by itself.
      was_resized: whether the job ended because `is_out_of_date` returned a reason: after a whole step, unless a rank
        did not answer.
      has_trained: whether at least one rank was in a training.
      might_still_run: whether some ranks might still run, because their host cannot be reached or kept them when they
        were killed.
    """

    exit_code: int
    has_failed: bool
    lost: tuple[str, ...] = ()
    was_torn: bool = False
    was_resized: bool = False
    has_trained: bool = False
    might_still_run: bool = False
