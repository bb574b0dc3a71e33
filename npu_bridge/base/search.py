"""Searches any graph, breadth first or in the order of dependencies."""

from __future__ import annotations

import collections
from collections.abc import Callable, Hashable, Iterable, Iterator
from typing import TypeVar

Node = TypeVar("Node", bound=Hashable)


def search(starts: Iterable[Node], neighbours: Callable[[Node], Iterable[Node]]) -> Iterator[Node]:
    """Yields every reachable node once, breadth first; the starts come first.

    Calls `neighbours` for a node only after yielding the node, so a caller can stop early. An empty result of
    `neighbours` ends the search at that node.
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
    """Returns all reachable nodes, each after the nodes that it needs; one edge of each cycle is ignored.

    Visits nodes in the order of `starts` and `needs`. So ranks with equal `starts` and `needs` get equal results.
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
