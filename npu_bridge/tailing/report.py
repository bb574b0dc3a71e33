"""Reports the changes that tail optimisation made to a graph, as text and as JSON."""

from __future__ import annotations

import dataclasses
import json

NO_GRADIENTS = "no gradient is all-reduced in this graph"


@dataclasses.dataclass
class Fragment:
    """A group of gradients that are all-reduced before the gradients of the next fragment.

    Attributes:
      transfers: names of the all-reduce ops, in order.
      size_bytes: bytes that the ops send, by static shapes.
    """

    transfers: list[str]
    size_bytes: int


@dataclasses.dataclass
class TailingReport:
    """The findings and changes of tail optimisation in a graph.

    Attributes:
      fragments: fragments of all-reduces of gradients, in the order they are issued. In an unchanged graph, each
        all-reduce is a fragment.
      freed: dict from the name of each decision that now needs only local gradients to the ops that wait for it.
      kept: dict from each check that must still wait for the last fragment to the reason.
      unchanged_because: reason why the graph is unchanged; "" for a changed graph.
      advice: for an unchanged graph, advice to the author of the script.
    """

    fragments: list[Fragment] = dataclasses.field(default_factory=list)
    freed: dict[str, list[str]] = dataclasses.field(default_factory=dict)
    kept: dict[str, str] = dataclasses.field(default_factory=dict)
    unchanged_because: str = ""
    advice: str = ""

    @property
    def has_changed(self) -> bool:
        """Whether the graph was changed."""
        return bool(self.freed)

    @property
    def has_found_gradients(self) -> bool:
        """Whether the graph all-reduces gradients; otherwise there is nothing to optimise."""
        return self.unchanged_because != NO_GRADIENTS

    def text(self) -> str:
        """Formats the report in a few lines."""
        if not self.has_changed:
            because = f"{self.unchanged_because}. {self.advice}".rstrip()
            return f"is_tailing_optimization leaves this graph and its results unchanged: {because}"
        sizes = ", ".join(f"{fragment.size_bytes / 1e6:.1f} MB" for fragment in self.fragments)
        count = f"{len(self.fragments)} fragment{'' if len(self.fragments) == 1 else 's'}"
        lines = [f"tail optimisation: {count} ({sizes})"] if self.fragments else []
        for decision, waiting in self.freed.items():
            lines.append(f"  {decision} is decided from local gradients; {len(waiting)} ops wait for it")
        lines += [f"  {name} still waits for the last fragment: {reason}" for name, reason in self.kept.items()]
        return "\n".join(lines)

    def json(self) -> str:
        """Formats the whole report as a JSON object."""
        return json.dumps(dataclasses.asdict(self), indent=2)
