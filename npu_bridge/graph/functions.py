"""Finds the functions in a graph's library that nodes of the graph call."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import tensorflow as tf

from npu_bridge.base.search import search
from npu_bridge.base.tf_internals.graphs import function_definition


def called_functions(node: Any) -> list[str]:
    """Returns the names of the functions in the attributes of a `NodeDef`."""
    attributes = node.attr.values()
    single = [value.func.name for value in attributes if value.HasField("func")]
    return single + [function.name for value in attributes for function in value.list.func]


def nodes_in_functions(graph: tf.Graph, nodes: Iterable[Any]) -> Iterator[Any]:
    """Yields the nodes of all functions that some nodes call, directly or through other functions; each function once.

    Functions that the graph lacks are ignored. The type of a node can also be the name of a function.
    """

    def known_functions(nodes):
        names = (name for node in nodes for name in (node.op, *called_functions(node)))
        return [name for name in names if function_definition(graph, name) is not None]

    def body(name):
        return function_definition(graph, name).node_def

    for name in search(known_functions(nodes), lambda name: known_functions(body(name))):
        yield from body(name)
