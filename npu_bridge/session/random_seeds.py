"""Gives seeds to random operators without one, in a graph and in the functions it holds.

TensorFlow's deterministic kernels raise an error at the first random operator without a seed. Each gets a seed made of
the graph's seed, its name and the rank: two runs draw the same numbers, two operators or ranks do not.
"""

from __future__ import annotations

import functools
import re
import zlib
from collections.abc import Callable
from typing import Any

import tensorflow as tf

from npu_bridge import collective
from npu_bridge.base.tf_internals.graphs import (
    function_definitions,
    opened_for_changes,
    operator_definition,
    set_attribute,
)

_SEEDS = ("seed", "seed2")
_SUFFIX = "_seeded"


def seed_operators(graph: tf.Graph, seed: int) -> list[str]:
    """Gives a seed to every random operator, and every dataset that shuffles, without one.

    Args:
      graph: the graph, which may be finalized; operators that a session has run draw as before.
      seed: the seed of the graph.
    Returns:
      The names of the operators, those in functions last.
    Graph: adds changed copies of functions with such operators, and has them called in place of the originals.
    """
    number_of = functools.partial(_number_of, collective.current().rank)
    names, find = [], graph.get_operation_by_name
    for op in graph.get_operations():
        if _where_seeds_are(op.type) is None:
            continue
        changes = _changes(op.node_def, lambda name: find(name).node_def, seed, number_of(op.name))
        for name, attribute, value in changes:
            set_attribute(find(name), attribute, value)
        names += [op.name] if changes else []
    return [*names, *_seed_functions(graph, seed, number_of)]


def _number_of(rank: int, name: str) -> int:
    """Computes the second seed of an operator, above 0."""
    return zlib.crc32(f"{rank} {name}".encode()) & 0x7FFFFFFF or 1


@functools.cache
def _where_seeds_are(type_name: str) -> tuple | None:
    """Returns the positions of the two seeds among the inputs of a type; () for attributes, None without seeds."""
    definition = operator_definition(type_name)
    if definition is None:
        return None
    if {attribute.name for attribute in definition.attr}.issuperset(_SEEDS):
        return ()
    inputs = [argument.name for argument in definition.input_arg]
    return tuple(map(inputs.index, _SEEDS)) if set(inputs).issuperset(_SEEDS) else None


def _changes(node: Any, find: Callable[[str], Any], seed: int, number: int) -> list[tuple]:
    """Returns the changes that give a node seeds: (name of a node, attribute, its value); empty if it has seeds."""
    positions = _where_seeds_are(node.op)
    if positions is None:
        return []
    if not positions:
        is_seeded = any(node.attr[name].i for name in _SEEDS)
        values = [tf.compat.v1.AttrValue(i=value) for value in (seed, number)]
        return [] if is_seeded else [(node.name, *pair) for pair in zip(_SEEDS, values)]
    sources = [node.input[position].partition(":")[0] for position in positions]
    constants = [find(name) for name in sources]
    if any(constant is None or constant.op != "Const" for constant in constants):
        return []
    if any(tf.make_ndarray(constant.attr["value"].tensor).any() for constant in constants):
        return []
    tensors = [tf.make_tensor_proto(value, tf.int64) for value in (seed, number)]
    return [(name, "value", tf.compat.v1.AttrValue(tensor=tensor)) for name, tensor in zip(sources, tensors)]


def _seed_functions(graph, seed, number_of):
    """Gives seeds to the random operators in functions; returns their names."""
    # Sorted, not by name: the numbers in names count all functions of the process and differ between runs.
    definitions = sorted(
        function_definitions(graph), key=lambda each: [*map(int, re.findall(r"\d+", each.signature.name))]
    )
    names, changed = [], {}
    for position, definition in enumerate(definitions):
        nodes = {node.name: node for node in definition.node_def}
        for node in definition.node_def:
            changes = _changes(node, nodes.get, seed, number_of(f"{position} {node.name}"))
            for name, attribute, value in changes:
                nodes[name].attr[attribute].CopyFrom(value)
            names += [node.name] if changes else []
            if changes:
                changed[definition.signature.name] = definition
    if changed:
        _call_instead(graph, _with_callers(changed, definitions))
    return names


def _with_callers(changed, definitions):
    """Returns the changed functions and their direct and indirect callers, by name."""
    while True:
        more = {
            each.signature.name: each
            for each in definitions
            if any(called.name in changed for node in each.node_def for called in _called(node.attr.values()))
        }
        if more.keys() <= changed.keys():
            return changed
        changed = {**changed, **more}


def _called(attributes):
    """Yields the functions that attributes of a node name; changing them changes the node."""
    for attribute in attributes:
        yield from [attribute.func] if attribute.HasField("func") else attribute.list.func


def _call_instead(graph, changed):
    """Adds the functions under new names and has the operators that called the old ones call them."""
    for definition in changed.values():
        definition.signature.name += _SUFFIX
        for node in definition.node_def:
            _rename(node.attr.values(), changed)
    library = tf.compat.v1.GraphDef()
    library.versions.CopyFrom(graph.graph_def_versions)
    library.library.function.extend(changed.values())
    with opened_for_changes(graph), graph.as_default():
        tf.compat.v1.import_graph_def(library, name="")
    for op in graph.get_operations():
        node = op.node_def if any(attribute.type in ("func", "list(func)") for attribute in op.op_def.attr) else None
        for name, attribute in node.attr.items() if node else ():
            if _rename([attribute], changed):
                set_attribute(op, name, attribute)


def _rename(attributes, changed):
    renamed = [called for called in _called(attributes) if called.name in changed]
    for called in renamed:
        called.name += _SUFFIX
    return renamed
