"""Whether an optimizer averages gradients over the ranks already, whoever made it do so."""

from __future__ import annotations

from typing import Any

_MARK = "_averages_over_ranks"


def mark_as_distributed(optimizer: Any) -> None:
    """Notes on the object that its gradients are averaged; whoever wraps it next will know."""
    object.__setattr__(optimizer, _MARK, True)


def is_distributed(optimizer: Any) -> bool:
    """True for an optimizer that carries the mark, or is a Keras loss-scale optimizer around one that does."""
    while optimizer is not None:
        if getattr(optimizer, _MARK, False):
            return True
        optimizer = getattr(optimizer, "inner_optimizer", None)
    return False
