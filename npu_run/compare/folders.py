"""Compares losses, tensors and checkpoints of two folders, if both folders have them."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from npu_run.compare.band import LossBand, compare_losses
from npu_run.compare.checkpoint_files import checkpoints_in
from npu_run.compare.checkpoints import VariableComparison, compare_checkpoints
from npu_run.compare.dumps import read_dumps
from npu_run.compare.losses import Losses, list_repeat_folders, read_repeats
from npu_run.compare.tensors import TensorComparison, compare_dumps
from npu_run.compare.verdict import NotComparableError, NothingToCompareError, Verdict

KINDS = ("losses", "tensors", "checkpoints")


class FolderComparison(NamedTuple):
    """The comparison of two folders.

    Attributes:
      a, b: paths of the folders.
      verdicts: a verdict on each kind of data (`KINDS`) that both folders have, or that was requested.
      notes: sentences about kinds of data that only one folder has.
      losses: losses of all repeats of A and of B. This field and the following ones are None if not compared.
      band: the band of the losses; None without repeats.
      tensors: the comparison of the last dumped step that was compared.
      variables: variables at the deciding step, worst first.
    """

    a: str
    b: str
    verdicts: list[Verdict]
    notes: list[str]
    losses: tuple[list[Losses], list[Losses]] | None = None
    band: LossBand | None = None
    tensors: TensorComparison | None = None
    variables: list[VariableComparison] | None = None

    @property
    def is_inside(self) -> bool | None:
        """False if any verdict is "outside", else None if any verdict is "cannot be told", else True."""
        found = [verdict.is_inside for verdict in self.verdicts]
        return False if False in found else None if None in found or not found else True

    @property
    def exit_code(self) -> int:
        """Exit code: 0 if `is_inside` is True, 1 if it is False, 2 if it is None."""
        return {True: 0, False: 1, None: 2}[self.is_inside]

    def as_json_facts(self) -> dict[str, Any]:
        """Returns the comparison as plain data for JSON; without a result, with the `problem`."""
        undecided = [verdict.sentence for verdict in self.verdicts if verdict.is_inside is None]
        return {
            "a": self.a,
            "b": self.b,
            "inside": self.is_inside,
            "verdicts": [{**verdict._asdict(), "notes": list(verdict.notes)} for verdict in self.verdicts],
            "notes": self.notes,
            **({"problem": undecided[0]} if self.is_inside is None else {}),
        }


def compare_folders(
    a: str,
    b: str,
    only: Sequence[str] = (),
    tag: str | None = None,
    tolerance: float | None = None,
    names: Mapping[str, str] | None = None,
) -> FolderComparison:
    """Compares two folders; each holds a training, repeats of one training, or dumped tensors.

    Args:
      a: the folder of the reference.
      b: the folder to check.
      only: the kinds to compare, out of `KINDS`; empty means all kinds that both folders have.
      tag: name of the loss in event files.
      tolerance: relative tolerance of tensors; None means the tolerance of the dtype.
      names: dict from names of A's operators to names of B's operators.
    Raises:
      NotComparableError: the folders have nothing in common.
    """
    for path in (a, b):
        if not os.path.exists(path) and not os.path.exists(f"{path}.index"):
            raise NotComparableError(
                f"There is no {path!r}; name the folder of a training, of its repeats or of a dump."
            )
    found: dict[str, Any] = {}

    def judge_losses(of_a, of_b):
        found["losses"] = (of_a, of_b)
        verdict, found["band"] = compare_losses(of_a, of_b)
        return verdict

    def judge_tensors(of_a, of_b):
        verdict, found["tensors"] = compare_dumps(of_a[0], of_b[0], tolerance, names, of_a[1:])
        return verdict

    def judge_checkpoints(of_a, of_b):
        verdict, found["variables"] = compare_checkpoints(of_a, of_b)
        return verdict

    readers = {
        "losses": (lambda path: read_repeats(path, tag), judge_losses),
        "tensors": (lambda path: [read_dumps(folder) for folder in list_repeat_folders(path)], judge_tensors),
        "checkpoints": (_find_checkpoints, judge_checkpoints),
    }
    verdicts, notes = [], []
    for kind in only or KINDS:
        verdict, note = _compare_files_of_kind(kind, a, b, *readers[kind], is_asked_for=bool(only))
        verdicts += [] if verdict is None else [verdict]
        notes += [note] if note else []
    if not verdicts:
        raise NotComparableError(
            f"{a} and {b} have nothing in common that could be compared. {' '.join(notes)} Expected histories, event "
            f"files, checkpoints or dumped tensors in both."
        )
    return FolderComparison(a, b, verdicts, notes, **found)


def _compare_files_of_kind(
    kind: str, a: str, b: str, read: Callable[[str], Any], compare: Callable[[Any, Any], Verdict], is_asked_for: bool
) -> tuple[Verdict | None, str]:
    sides, missing = {}, ""
    try:
        for path in (a, b):
            try:
                sides[path] = read(path)
            except NothingToCompareError as error:
                missing = missing or str(error)
        if missing and is_asked_for:
            raise NotComparableError(missing)
        if missing:
            return None, "".join(f"Only {path} has {kind}." for path in sides)
        with np.errstate(all="ignore"):  # numbers near the largest float may become infinite
            return compare(sides[a], sides[b]), ""
    except NotComparableError as error:
        return Verdict(kind, None, str(error), {}), ""


def _find_checkpoints(path: str) -> list[dict[int, str]]:
    found = [checkpoints_in(folder) for folder in list_repeat_folders(path)]
    if not all(found):
        raise NothingToCompareError(f"{path} holds no checkpoints; expected files that end in .index.")
    return found
