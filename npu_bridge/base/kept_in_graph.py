"""Keeps values in TF 1 graphs, so that a value is freed together with its graph, even if the value refers to it."""

from __future__ import annotations

from typing import Any, Callable


def find_or_make(graph: Any, key: tuple, make: Callable[[], Any]) -> Any:
    """Returns a value that is kept in a graph; makes it at the first call.

    Args:
      graph: a TF 1 graph or the graph of a function; it can be finalized.
      key: name of the collection that holds the value; a tuple, as TensorFlow exports collections with text keys.
      make: returns the new value.
    """
    kept = graph.get_collection_ref(key)
    if not kept:
        kept.append(make())
    return kept[0]
