"""Chooses the layers that each update trains: divides them into groups, and sets the order of the groups."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from npu_bridge.base.arguments import (
    check_choice,
    check_count,
    check_instance,
    check_list,
    check_number,
    check_pattern,
    is_number,
)
from npu_bridge.base.errors import KeywordChecksMixin, did_you_mean, message, shown
from npu_bridge.base.tf_internals import keras3

KINDS = ("interval", "continuous", "explicit")
_OWNER = "FreezeSchedule"
# Variables of these names belong to the layer before them, whose output they normalise or shift.
_PATTERN_OF_SAME_LAYER = re.compile(r"(?<![a-z])bn|bias|batch_norm")
_FULL_BLOCK_SIZE = 3  # a block with this many variables is full: the next layer begins a new one


class FreezeSchedule(KeywordChecksMixin):
    """A schedule that chooses for each update which variables to train.

    The model is split into parts, one for each group, numbered from 0 at the input. Group i trains part i and all later
    parts, and freezes the earlier parts: group 0 trains all variables. The backward pass of group i ends where part i
    begins.

    Args:
      groups: the number of groups, at least 1, or a list with an entry for each part. With a number, the model is split
        into blocks of whole layers with at least 3 variables, in the order of the variables; variables whose names
        contain "bn" or "bias" stay with the layer before. Each part has the same number of blocks, and the last part
        also takes the remainder. An entry of a list is a list of variables, or of regular expressions that are searched
        in the names of variables. Variables in no entry are always trained.
      kind: "interval" freezes layers in regular updates, and draws how many; few layers are more likely than many.
        "continuous" repeats a series: full updates, at least one and at most `full_share` of the
        series, then one update of each other group. "explicit" uses `sequence`.
      full_share: share of the updates that train all variables, above 0 and at most 1.
      total_steps: number of updates in the training. A sequence is 1 % longer than this, and repeats after its end.
      seed: seed of the random choices; must be equal on all ranks.
      sequence: with "explicit", the group of each update.
    Raises:
      TypeError: an argument is of another type.
      ValueError: an argument is unknown, or out of its range.
    """

    def __init__(
        self,
        groups: int | Sequence = 10,
        kind: str = "interval",
        full_share: float = 0.7,
        total_steps: int = 65536,
        seed: int = 0,
        sequence: Sequence[int] | None = None,
    ):
        self._patterns = None if is_number(groups) else _make_patterns(groups)
        self.group_count = _check_count_argument("groups", groups) if self._patterns is None else len(self._patterns)
        self._kind = check_choice(_OWNER, "kind", kind, KINDS, "Use 'interval' to draw the groups.")
        fix = "Use 0.7 to train all layers in 7 of 10 updates, and to freeze some layers in the others."
        self._full_share = check_number(_OWNER, "full_share", full_share, fix, above=0, at_most=1)
        self._total_steps, self._seed = (
            _check_count_argument("total_steps", total_steps),
            _check_count_argument("seed", seed, 0),
        )
        self._explicit = _check_sequence(sequence, kind, self.group_count)
        self.sequence = self._make_sequence()

    def get_config(self) -> dict:
        """Returns the arguments of the constructor as plain data, with regular expressions in place of variables."""
        config = {
            "groups": self.group_count if self._patterns is None else [list(part) for part in self._patterns],
            "kind": self._kind,
        }
        if self._kind == "explicit":
            return {**config, "sequence": list(self._explicit)}
        return {**config, "full_share": self._full_share, "total_steps": self._total_steps, "seed": self._seed}

    @classmethod
    def of(cls, schedule: Any) -> FreezeSchedule:
        """Returns a schedule unchanged, or makes a schedule from a mapping of its arguments.

        Raises:
          TypeError: `schedule` is neither a schedule nor a mapping.
          ValueError: the mapping has an unknown argument.
        """
        if isinstance(schedule, cls):
            return schedule
        fix = "Write Freeze(FreezeSchedule(groups=10))."
        check_instance("Freeze", "schedule", schedule, Mapping, "a FreezeSchedule", fix)
        known = ("groups", "kind", "full_share", "total_steps", "seed", "sequence")
        for key in schedule:
            if key not in known:
                fix = did_you_mean(key, known, "Remove it.")
                problem = f"schedule has an unknown key {shown(key)}"
                raise ValueError(message("Freeze", problem, f"one of {', '.join(known)}", shown(key), fix))
        return cls(**schedule)

    def digest(self) -> str:
        """Returns a hash of the groups of all updates, to compare ranks."""
        return hashlib.sha256(self.sequence.astype(np.int64).tobytes()).hexdigest()[:16]

    def last_group_of_each(self, variable_names: Sequence[str]) -> list[int]:
        """Returns the last group that trains each variable.

        Args:
          variable_names: names of the trained variables, in the order of the layers.
        Raises:
          ValueError: a regular expression matches no name, two parts contain the same variable, or there are fewer
            blocks than groups.
        """
        variable_names = [name.partition(":")[0] for name in variable_names]
        if self._patterns is not None:
            return self._last_groups_of_patterns(variable_names)
        blocks = assign_blocks(variable_names)
        count = blocks[-1] + 1 if blocks else 0
        if count < self.group_count:
            problem = "the model has too few layers for so many groups"
            got = f"{count} blocks of layers for {self.group_count} groups"
            fix = f"Use groups={count}, or lists of variables." if count else "Train some variables."
            raise ValueError(message("Freeze", problem, "at least one block for each group", got, fix))
        stride = count // self.group_count
        return [min(block // stride, self.group_count - 1) for block in blocks]

    def _last_groups_of_patterns(self, names):
        last = dict.fromkeys(range(len(names)), self.group_count - 1)
        named: dict[int, int] = {}
        for part, patterns in enumerate(self._patterns):
            for pattern in patterns:
                found = [position for position, name in enumerate(names) if re.search(pattern, name)]
                if not found:
                    fix = did_you_mean(re.sub(r"[\\^$]", "", pattern), names, "Write a part of a name.")
                    some = ", ".join(names[:4]) + (", ..." if len(names) > 4 else "")
                    problem = f"an expression in part {part} of groups matches no trained variable"
                    raise ValueError(message("Freeze", problem, f"one of {some}", repr(pattern), fix))
                for position in found:
                    if named.setdefault(position, part) != part:
                        got = f"{names[position]} in parts {named[position]} and {part}"
                        problem, fix = "a variable is in two parts of groups", "Write a narrower expression."
                        raise ValueError(message("Freeze", problem, "each variable in one part", got, fix))
        return [named.get(position, group) for position, group in last.items()]

    def _make_sequence(self):
        length = int(1.01 * self._total_steps)
        if self._explicit is not None:
            made = np.array(self._explicit)
        elif self.group_count == 1 or self._full_share == 1:
            made = np.zeros(max(1, length))
        elif self._kind == "continuous":
            full = int((self._full_share * (self.group_count - 1)) // (1 - self._full_share))
            full = max(full, 1)  # else group 0 would never be trained
            made = np.resize([*[0] * full, *range(1, self.group_count)], length)
        else:
            made = self._draw_sequence(length)
        return made.astype(np.int8 if self.group_count < 128 else np.int32)

    def _draw_sequence(self, length):
        """Draws each update's group: one that freezes layers if too few updates did so far, else 0 (all layers)."""
        count = self.group_count
        random = np.random.Generator(np.random.PCG64(self._seed))
        weights = np.arange(count - 1, 0, -1, dtype=np.float64)
        drawn = random.choice(np.arange(1, count), size=length, p=weights / weights.sum())
        made, frozen = np.zeros(max(1, length), np.int64), 0
        for update in range(1, length):
            if frozen < (1 - self._full_share) * update:
                made[update] = drawn[frozen]
                frozen += 1
        return made


def assign_blocks(variable_names: Sequence[str]) -> list[int]:
    """Returns the block of each variable, from 0: a layer begins a new block if the last block has 3 variables or more.

    Args:
      variable_names: names of the variables in the order of the layers; the part before the last "/" names the layer.
    """
    blocks, held, layer = [], 0, None
    for name in variable_names:
        own_layer = name.rpartition("/")[0]
        joins = _PATTERN_OF_SAME_LAYER.search(name.lower()) or (own_layer and own_layer == layer)
        is_new = not blocks or (held >= _FULL_BLOCK_SIZE and not joins)
        blocks.append((blocks[-1] + 1 if blocks else 0) if is_new else blocks[-1])
        held, layer = 1 if is_new else held + 1, own_layer
    return blocks


def _check_count_argument(name, value, least=1):
    return check_count(_OWNER, name, value, "Leave it out for the default.", at_least=least, at_most=2**31 - 1)


def _make_patterns(groups):
    """Returns a tuple of regular expressions for each part of the model."""
    expected = "a number of groups, or a list of lists of variables or regular expressions"
    parts = []
    for part in check_list(_OWNER, "groups", groups, "Leave it out for 10 groups.", "a number or a list", expected):
        fix = "Write [['embedding'], ['layer_0/', 'layer_1/'], ...]."
        entries = check_list(_OWNER, "an entry of groups", part, fix, expected=expected)
        parts.append(tuple(_make_pattern(entry, expected) for entry in entries))
    if not parts or not all(parts):
        raise ValueError(message(_OWNER, "groups has an empty list", expected, shown(groups), "Leave it out."))
    return tuple(parts)


def _make_pattern(entry, expected):
    if not isinstance(entry, str) and hasattr(entry, "name") and hasattr(entry, "shape"):
        return f"^{re.escape(keras3.name_of(entry))}$"
    fix, what = "Write a part of a variable's name.", "a variable or a regular expression"
    check_instance(_OWNER, "an element of a list of groups", entry, str, what, fix, expected)
    return check_pattern(_OWNER, "an element of a list of groups", entry)


def _check_sequence(sequence, kind, count):
    if (sequence is None) == (kind == "explicit"):
        problem = "sequence and kind='explicit' belong together"
        got = f"kind={kind!r} and sequence={'None' if sequence is None else '[...]'}"
        fix = "Pass both sequence and kind='explicit', or neither."
        raise ValueError(message(_OWNER, problem, "both or none", got, fix))
    if sequence is None:
        return None
    expected = f"a list of groups, each 0 to {count - 1}"
    entries = check_list(_OWNER, "sequence", sequence, "Write [0, 1, 2].", expected=expected)
    if not entries:
        raise ValueError(message(_OWNER, "sequence is empty", expected, "[]", "Write [0] to train all layers."))
    for position, entry in enumerate(entries):
        if check_count(_OWNER, f"entry {position} of sequence", entry, "Correct the entry.", at_least=0) >= count:
            problem = f"entry {position} of sequence is not a group"
            raise ValueError(message(_OWNER, problem, expected, shown(entry), "Correct the entry."))
    return [int(entry) for entry in entries]
