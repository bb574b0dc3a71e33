"""Searches any graph: breadth first, or in the order of dependencies."""

from __future__ import annotations

import collections
from collections.abc import Callable, Hashable, Iterable, Iterator
from typing import TypeVar

Node = TypeVar("Node", bound=Hashable)


def search(starts: Iterable[Node], neighbours: Callable[[Node], Iterable[Node]]) -> Iterator[Node]:
    """Yields every reachable node once, breadth first; the starts come first.

    Yields a node before it asks for its neighbours, so a caller can stop early. `neighbours` can return none to end the
    search there.
    """
    waiting = collections.deque(dict.fromkeys(starts))
    seen = set(waiting)
    while waiting:
        node = waiting.popleft()
        yield node
        new = [other for other in dict.fromkeys(neighbours(node)) if other not in seen]
        seen.update(new)
        waiting.extend(new)


def dependency_order(starts: Iterable[Node], needs: Callable[[Node], Iterable[Node]]) -> list[Node]:
    """Returns every reachable node after all it needs; of a cycle one edge is left out.

    Visits nodes in the order of `starts` and `needs`, so the result is the same on every rank if these are.
    """
    done: dict[Node, None] = {}
    entered: set[Node] = set()
    stack = list(starts)[::-1]
    while stack:
        node = stack[-1]
        if node in entered:
            done.setdefault(stack.pop())
        else:
            entered.add(node)
            stack.extend(other for other in [*needs(node)][::-1] if other not in entered)
    return list(done)
