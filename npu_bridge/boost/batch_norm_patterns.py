"""Finds removable batch normalisations in networks of residual or dense blocks, from the kinds of their operations.

A block begins where a tensor is used twice, and ends where both paths meet again. Three kinds are recognised:

    residual block           add(f(x), x) or add(f(x), norm(conv(x))), f = conv norm act ... conv norm
    inverted residual block  add(f(x), x), f = conv norm act depthwise norm act conv norm
    dense block              concat(x, f(x)), f = norm act conv norm act conv

A residual block loses its inner normalisations and the normalisation of its shortcut, and keeps the last one before the
addition. An inverted residual block loses the normalisation after the expansion, a dense block the normalisation
between the convolutions.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Mapping

RESIDUAL, INVERTED, DENSE = "residual block", "inverted residual block", "dense block"
# Kinds of operations for the patterns. PASS can stand anywhere: padding, adding a bias, dropping out.
CONV, DEPTHWISE, NORM, ACT, ADD, CONCAT, PASS, OTHER = (
    "conv",
    "depthwise",
    "norm",
    "act",
    "add",
    "concat",
    "pass",
    "other",
)


@dataclasses.dataclass(frozen=True)
class Node:
    """An operation of a network.

    Attributes:
      kind: the kind in the patterns, such as `CONV`.
      inputs: names of the nodes that give its inputs, in order.
    """

    kind: str
    inputs: tuple[str, ...]


@dataclasses.dataclass
class BlockMatches:
    """The matches of the patterns in a network.

    Attributes:
      removable: the kind of the block, by the name of each removable normalisation.
      left_alone: the difference from a known kind of block, by the name of the node where the paths meet.
    """

    removable: dict[str, str] = dataclasses.field(default_factory=dict)
    left_alone: dict[str, str] = dataclasses.field(default_factory=dict)


def match_blocks(nodes: Mapping[str, Node], outputs: Collection[str] = ()) -> BlockMatches:
    """Matches the patterns in a network, given its nodes by name, and the names of the network's outputs."""
    uses = dict.fromkeys(outputs, 1)
    for node in nodes.values():
        for name in node.inputs:
            uses[name] = uses.get(name, 0) + 1
    found = BlockMatches()
    for name, node in nodes.items():
        if node.kind not in (ADD, CONCAT) or len(node.inputs) != 2:
            continue
        paths = [_trace_path_back(source, nodes, uses) for source in node.inputs]
        if paths[0].start != paths[1].start:
            reason = "its two sides do not begin at one point"
        elif node.kind == ADD:
            reason = _match_addition(paths, found)
        else:
            reason = _match_concatenation(paths, found)
        if reason:
            found.left_alone[name] = reason
    return found


@dataclasses.dataclass
class _BlockPath:
    """One path through a block: the start node, and the later nodes, except nodes of kind PASS."""

    start: str
    names: list
    kinds: list


def _trace_path_back(name, nodes, reader_counts):
    """Follows a path back from the node where paths meet, to a node with other readers or with several inputs."""
    names = []
    while name in nodes and reader_counts.get(name) == 1 and len(nodes[name].inputs) == 1:
        if nodes[name].kind != PASS:
            names.append(name)
        name = nodes[name].inputs[0]
    names.reverse()
    return _BlockPath(name, names, [nodes[name].kind for name in names])


def _match_addition(paths, matches):
    shortcut, branch = sorted(paths, key=lambda path: len(path.kinds))
    if shortcut.kinds not in ([], [CONV, NORM]):
        return f"its shorter side is {' '.join(shortcut.kinds)}"
    kinds = branch.kinds
    if kinds == [CONV, NORM, ACT, DEPTHWISE, NORM, ACT, CONV, NORM]:
        if shortcut.kinds:
            return "its shortcut is not the input itself"
        matches.removable[branch.names[1]] = INVERTED
        return ""
    blocks = len(kinds) // 3
    if not blocks or kinds != [CONV, NORM, ACT] * blocks + [CONV, NORM]:
        return f"its longer side is {' '.join(kinds) or 'empty'}"
    inner = [name for name, kind in zip(branch.names, kinds) if kind == NORM][:-1]
    inner += [name for name, kind in zip(shortcut.names, shortcut.kinds) if kind == NORM]
    matches.removable.update(dict.fromkeys(inner, RESIDUAL))
    return ""


def _match_concatenation(paths, matches):
    shortcut, branch = sorted(paths, key=lambda path: len(path.kinds))
    if shortcut.kinds or branch.kinds != [NORM, ACT, CONV, NORM, ACT, CONV]:
        return f"its sides are {' '.join(shortcut.kinds) or 'empty'} and {' '.join(branch.kinds) or 'empty'}"
    matches.removable[branch.names[3]] = DENSE
    return ""


@dataclasses.dataclass(frozen=True)
class ThinningReport:
    """A report about removed batch normalisations.

    Attributes:
      removed: the kind of the block, by the name of each removed normalisation, in the order of the network.
      kept: the number of normalisations that stay.
      unchanged_because: why no normalisation was removed; "" if any was removed.
    """

    removed: Mapping[str, str]
    kept: int
    unchanged_because: str = ""

    def text(self) -> str:
        """Formats the report in a few lines."""
        if self.unchanged_because:
            return f"less_batch_norm leaves it unchanged: {self.unchanged_because}."
        kinds = list(self.removed.values())
        lines = [f"less_batch_norm: {len(kinds)} of {len(kinds) + self.kept} batch normalisations removed"]
        for kind in dict.fromkeys(kinds):
            names = [name for name, of_kind in self.removed.items() if of_kind == kind]
            lines.append(f"  {len(names)} in {kind}s: {', '.join(names)}")
        return "\n".join(lines)


def make_report(nodes: Mapping[str, Node], matches: BlockMatches) -> ThinningReport:
    """Reports which normalisations can be removed, or why none can be removed."""
    norms = sum(node.kind == NORM for node in nodes.values())
    removed = {name: matches.removable[name] for name in nodes if name in matches.removable}
    reason = ""
    if not norms:
        reason = "it has no batch normalisation"
    elif not removed and matches.left_alone:
        name, why = next(iter(matches.left_alone.items()))
        reason = f"its blocks have unknown forms; of the one that ends at {name}, {why}"
    elif not removed:
        reason = "it has no residual or dense block"
    return ThinningReport(removed, norms - len(removed), reason)
