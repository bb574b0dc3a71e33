"""Defines the result of a comparison: inside, outside, or cannot be told."""

from __future__ import annotations

from typing import Any, NamedTuple

WORDS = {True: "inside", False: "outside", None: "cannot be told"}  # for `is_inside`


class NotComparableError(ValueError):
    """Raised if two things cannot be compared; the message is a sentence that says why, and what to do."""


class NothingToCompareError(NotComparableError):
    """Raised if a folder holds nothing of the requested kind."""


class Verdict(NamedTuple):
    """The result of one comparison.

    Attributes:
      kind: what was compared: "losses", "tensors" or "checkpoints".
      is_inside: whether B agrees with A; None if it cannot be told.
      sentence: the result in words.
      facts: the findings, as plain data for JSON.
      notes: sentences about omitted data and unusual findings.
    """

    kind: str
    is_inside: bool | None
    sentence: str
    facts: dict[str, Any]
    notes: tuple[str, ...] = ()
