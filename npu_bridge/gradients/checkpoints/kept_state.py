"""Logs which state of stages a checkpoint lacks, and which state no stage uses; lists what each rank restores.

State that fits is restored, state that the checkpoint lacks starts from initial values, and state that no stage uses
is dropped; rank 0 logs each case once. A missing variable of the model, or a missing step count, is an error. State
that differs between ranks is saved as one row for each rank. Each rank restores:

    state                         same number of ranks             another number of ranks
    sums of Accumulate            its own row, bit for bit         the mean of all rows: the gradient of the window is
                                                                   a mean over the ranks, too
    unsent values of TopK and     its own row                      the mean of all rows, so the total still to be sent
    Threshold                                                      stays the same; dropped if nothing is held back any
                                                                   more (one rank, or a density too high to pay off)
    weights with PartialSync      its own row                      the mean of all rows
    slots with PartialSync, with  its own row                      the mean of all rows
    Adasum(on="weights")
    counts, loss scales, slots    the value equal on all ranks     the value equal on all ranks

If a variable is now equal on all ranks, since its stage was removed, a TF 1 graph also restores the mean; other
trainings restore rank 0's slots. A checkpoint of one rank, or a checkpoint written without `sync_all`, has no rows: all
ranks restore the values that it holds.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Iterable, Sequence

from npu_bridge import collective
from npu_bridge.base.errors import say_once

OF_RANKS = "of_ranks/"  # in the names of variables with a row for each rank
# Patterns in names of variables, in TF 1 graphs and in object-based checkpoints, each with a description for messages.
_KINDS = (
    (r"accumulated(_rows)?(/(?!counter)|$)", "Accumulate's sums"),
    (r"accumulated_steps|accumulated/counter", "Accumulate's count of batches"),
    (r"not_sent(/|$)", "unsent values of TopK or Threshold"),
    (r"freeze_updates", "Freeze's count of updates"),
    (r"updates_dealt|dealt/updates", "GlobalBatches' count of updates"),
    (r"partial_sync_updates", "PartialSync's count of updates"),
    (r"replicas_of_ranks|of_ranks/(weights|slots)_\d", "weights and slots of each rank"),
)
_OPTIMIZER_COUNTERS = r"beta\d_power|update_count"
_SCALES = ("loss_scale", "good_steps", "bad_steps", "skipped_steps", "last_step_skipped")  # listed by name, so ordered
_BY_NAME = rf"(.*/)?({'|'.join(_SCALES)})(_\d+)?"
_SLOTS = "slots of the optimizer"
_NAMES_IN_MESSAGE = 6


def describe_stage_state(name: str) -> str | None:
    """Returns the description, for messages, of the stage state that a variable holds; None for other variables."""
    return next((words for part, words in _KINDS if re.search(rf"(^|/){part}", name)), None)


def belongs_to_optimizer_state(name: str, variables: Iterable[str]) -> bool:
    """Returns whether a name in a checkpoint belongs to a stage, a slot of `variables` or an optimizer's count."""
    if (
        describe_stage_state(name)
        or re.fullmatch(_BY_NAME, name)
        or re.fullmatch(rf"(.*/)?({_OPTIMIZER_COUNTERS})(_\d+)?", name)
    ):
        return True
    parts = name.split("/")
    known = set(variables)
    return any("/".join(parts[:count]) in known for count in range(1, len(parts)))


def warn_about_missing_state(checkpoint: str, names: Sequence[str], slots: Iterable[str]) -> None:
    """Warns which state starts from initial values, because the checkpoint lacks it."""
    if names:
        listed = _format_names_by_kind(names, set(slots))
        _warn_on_rank_0(f"{checkpoint}: missing in the checkpoint: {listed}; they start from their initial values.")


def warn_about_unloaded_optimizer(file: str, reason: str) -> None:
    """Warns that nothing of a file is loaded into an optimizer."""
    _warn_on_rank_0(f"{file}: nothing is loaded into the optimizer, which stays as it is, {reason}.")


def warn_about_dropped_state(checkpoint: str, names: Sequence[str]) -> None:
    """Warns which state of the checkpoint is dropped, because no stage uses it."""
    if names:
        of_rules = {name for name in names if not re.fullmatch(_BY_NAME, name)}
        _warn_on_rank_0(f"{checkpoint}: dropped, as nothing here uses it: {_format_names_by_kind(names, of_rules)}.")


def warn_about_averaged_state(checkpoint: str, names: Sequence[str], counts: Iterable[int]) -> None:
    """Warns that another number of ranks wrote a checkpoint, and lists the state whose mean the ranks now restore."""
    if names:
        size, of = collective.current().size, " and ".join(map(str, sorted(set(counts))))
        now = f"{size} ranks" if size > 1 else "1 rank"
        listed = _format_names_by_kind(names, names, "weights and slots")
        _warn_on_rank_0(f"{checkpoint}: merged from {of} ranks for {now}, which continue with the mean: {listed}.")


def _warn_on_rank_0(text):
    if collective.current().rank == 0:
        say_once(logging.WARNING, f"npu_bridge: {text}")


def _format_names_by_kind(names, other_names, kind_of_others=_SLOTS):
    """Formats names by kind of state, with counts; `other_names` that belong to no stage have `kind_of_others`."""
    kinds: dict[str, int] = {}
    for name in names:
        kind = describe_stage_state(name) or (kind_of_others if name in other_names else name)
        kinds[kind] = kinds.get(kind, 0) + 1
    known = [*(of_stages for _, of_stages in _KINDS), kind_of_others]
    counts = [(kind, kinds[kind]) for kind in known if kind in kinds]
    by_name = [kind for kind in kinds if kind not in known]
    by_name.sort(key=lambda name: next((number for number, part in enumerate(_SCALES) if part in name), -1))
    more = [f"{len(by_name) - _NAMES_IN_MESSAGE} more"] if len(by_name) > _NAMES_IN_MESSAGE else []
    return ", ".join(
        [f"{kind} ({count} variable{'s' * (count > 1)})" for kind, count in counts] + by_name[:_NAMES_IN_MESSAGE] + more
    )
