"""Reports the changes of tail optimisation to a graph, as text and as JSON."""

from __future__ import annotations

import dataclasses
import json

NO_GRADIENTS = "no gradient is all-reduced in this graph"


@dataclasses.dataclass
class Fragment:
    """Gradients that are all-reduced one after the other, before those of the next fragment.

    Attributes:
      transfers: names of the ops, in order.
      size_bytes: bytes that they send, by static shapes.
    """

    transfers: list[str]
    size_bytes: int


@dataclasses.dataclass
class TailingReport:
    """The findings and changes of the pass.

    Attributes:
      fragments: the gradients' all-reduces in the order they are issued; each by itself where nothing was changed.
      freed: names of the decisions that are now taken from local gradients, each with the ops that wait for it.
      kept: checks that must still wait for the last fragment, and why.
      unchanged_because: why nothing was changed; "" when something was.
      advice: in that case, what the script's author can do about it.
    """

    fragments: list[Fragment] = dataclasses.field(default_factory=list)
    freed: dict[str, list[str]] = dataclasses.field(default_factory=dict)
    kept: dict[str, str] = dataclasses.field(default_factory=dict)
    unchanged_because: str = ""
    advice: str = ""

    @property
    def has_changed(self) -> bool:
        """True when the graph was changed."""
        return bool(self.freed)

    @property
    def has_found_gradients(self) -> bool:
        """True when gradients are all-reduced in the graph; without any, there was nothing to do."""
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
