"""Fits the state of stages in a checkpoint to a training with other stages or another number of ranks.

State that fits is read, state that the checkpoint lacks begins anew, and state without a user is dropped; rank 0 logs
each case once. A missing variable of the model, or a missing step count, is an error. State that each rank keeps for
itself is saved as a row for each rank, and continues with any number of ranks:

    kind                          the same number of ranks         another number of ranks
    sums of Accumulate            each rank its own, bit for bit   all ranks the mean of the rows: the gradient of the
                                                                   window is a mean over the ranks, too
    what TopK, Threshold kept     each rank its own                all ranks the mean: what is still owed to the
                                                                   variables stays the same; where nothing is kept
                                                                   (one rank, a density that pays no more) it is dropped
    weights with PartialSync      each rank its own                all ranks the mean
    slots with PartialSync, with  each rank its own                all ranks the mean
    Adasum(on="weights")
    counts, loss scales, slots    alike on all ranks               the same values

A row for each rank also becomes the mean where its variable is no longer each rank's own (the stage is gone). A
checkpoint of one rank, or one that was written without `sync_all`, has no rows: all ranks take the values it holds.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Iterable, Sequence

from npu_bridge import collective
from npu_bridge.base.errors import say_once

OF_RANKS = "of_ranks/"  # in the names of variables with a row for each rank
# Patterns in names of variables, in TF 1 graphs and in object-based checkpoints, with the words of messages for them.
_KINDS = (
    (r"accumulated(_rows)?(/(?!counter)|$)", "Accumulate's sums"),
    (r"accumulated_steps|accumulated/counter", "Accumulate's count of batches"),
    (r"not_sent(/|$)", "unsent values of TopK or Threshold"),
    (r"freeze_updates", "Freeze's count of updates"),
    (r"updates_dealt|dealt/updates", "GlobalBatches' count of updates"),
    (r"partial_sync_updates", "PartialSync's count of updates"),
)
_OF_RULES = r"beta\d_power|update_count"
_SCALES = ("loss_scale", "good_steps", "bad_steps", "skipped_steps", "last_step_skipped")  # listed by name, so ordered
_BY_NAME = rf"(.*/)?({'|'.join(_SCALES)})(_\d+)?"
_SLOTS = "slots of the optimizer"
_SHOWN = 6


def kind_of(name: str) -> str | None:
    """Returns the words of messages for the state of a stage with such a name; None for other names."""
    return next((words for part, words in _KINDS if re.search(rf"(^|/){part}", name)), None)


def is_kept(name: str, variables: Iterable[str]) -> bool:
    """Returns True for the name of a stage's state, of a slot of these variables, or of a number that rules keep."""
    if kind_of(name) or re.fullmatch(_BY_NAME, name) or re.fullmatch(rf"(.*/)?({_OF_RULES})(_\d+)?", name):
        return True
    parts = name.split("/")
    known = set(variables)
    return any("/".join(parts[:count]) in known for count in range(1, len(parts)))


def say_begun(checkpoint: str, names: Sequence[str], slots: Iterable[str]) -> None:
    """Warns which state the checkpoint lacks, so that it starts from its initial values."""
    if names:
        listed = _listed(names, set(slots))
        _say(f"{checkpoint}: begun anew, as the checkpoint has none: {listed}; they start from their initial values.")


def say_dropped(checkpoint: str, names: Sequence[str]) -> None:
    """Warns which state of the checkpoint has no use here."""
    if names:
        of_rules = {name for name in names if not re.fullmatch(_BY_NAME, name)}
        _say(f"{checkpoint}: dropped, as nothing here uses it: {_listed(names, of_rules)}.")


def say_merged(checkpoint: str, names: Sequence[str], counts: Iterable[int]) -> None:
    """Warns which rows became their mean, and how many ranks had written them."""
    if names:
        size, of = collective.current().size, " and ".join(map(str, sorted(set(counts))))
        now = f"{size} ranks" if size > 1 else "1 rank"
        listed = _listed(names, names, "weights and slots")
        _say(f"{checkpoint}: merged from {of} ranks for {now}, which continue with the mean: {listed}.")


def _say(text):
    if collective.current().rank == 0:
        say_once(logging.WARNING, f"npu_bridge: {text}")


def _listed(names, others, words=_SLOTS):
    """Lists names by kind with their numbers; names in `others` that belong to no stage count as `words`."""
    kinds: dict[str, int] = {}
    for name in names:
        kind = kind_of(name) or (words if name in others else name)
        kinds[kind] = kinds.get(kind, 0) + 1
    known = [*(of_stages for _, of_stages in _KINDS), words]
    counts = [(kind, kinds[kind]) for kind in known if kind in kinds]
    by_name = [kind for kind in kinds if kind not in known]
    by_name.sort(key=lambda name: next((number for number, part in enumerate(_SCALES) if part in name), -1))
    more = [f"{len(by_name) - _SHOWN} more"] if len(by_name) > _SHOWN else []
    return ", ".join([f"{kind} ({_variables(count)})" for kind, count in counts] + by_name[:_SHOWN] + more)


def _variables(count):
    return f"{count} variable{'s' * (count > 1)}"
