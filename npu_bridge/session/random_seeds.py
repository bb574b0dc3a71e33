"""Gives each rank its seeds: for random operators without a seed, in a graph and its functions.

TensorFlow's deterministic kernels raise an error at the first random operator without a seed. Each such operator gets a
seed made of the graph's seed, the operator's name and the rank. So two runs of a script draw the same numbers, but two
operators or two ranks do not. An operator that is made after its graph got a seed, as in an Estimator, already has a
seed of TensorFlow's, which is the same on all ranks.
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
    allow_graph_changes,
    function_definitions,
    operator_definition,
    set_attribute,
)

_SEEDS = ("seed", "seed2")
_SUFFIX = "_seeded"


def seed_operators(graph: tf.Graph, seed: int) -> list[str]:
    """Gives a seed to every random operator, and every shuffling dataset, that has no seed.

    Args:
      graph: the graph, which can be finalized. Operators that a session has already run are not affected.
      seed: the seed of the graph.
    Returns:
      The names of the operators that got a seed; operators in functions come last.
    Graph: copies of functions with such operators, which are called instead of the originals.
    """
    second_seed = functools.partial(_compute_second_seed, collective.current().rank)
    names, find = [], graph.get_operation_by_name
    for op in graph.get_operations():
        if _seed_positions(op.type) is None:
            continue
        changes = _find_seed_changes(op.node_def, lambda name: find(name).node_def, seed, second_seed(op.name))
        for name, attribute, value in changes:
            set_attribute(find(name), attribute, value)
        names += [op.name] if changes else []
    return [*names, *_seed_functions(graph, seed, second_seed)]


def _compute_second_seed(rank: int, name: str) -> int:
    """Computes the second seed of an operator from its name and the rank; the seed is at least 1."""
    return zlib.crc32(f"{rank} {name}".encode()) & 0x7FFFFFFF or 1


@functools.cache
def _seed_positions(type_name: str) -> tuple | None:
    """Returns the input positions of a type's two seeds; () if seeds are attributes, None if there are no seeds."""
    definition = operator_definition(type_name)
    if definition is None:
        return None
    if {attribute.name for attribute in definition.attr}.issuperset(_SEEDS):
        return ()
    inputs = [argument.name for argument in definition.input_arg]
    return tuple(map(inputs.index, _SEEDS)) if set(inputs).issuperset(_SEEDS) else None


def _find_seed_changes(node: Any, find_function: Callable[[str], Any], seed: int, node_seed: int) -> list[tuple]:
    """Returns the changes, (name of a node, attribute, value), that give a node seeds; empty if it has seeds."""
    positions = _seed_positions(node.op)
    if positions is None:
        return []
    if not positions:
        is_seeded = any(node.attr[name].i for name in _SEEDS)
        values = [tf.compat.v1.AttrValue(i=value) for value in (seed, node_seed)]
        return [] if is_seeded else [(node.name, *pair) for pair in zip(_SEEDS, values)]
    sources = [node.input[position].partition(":")[0] for position in positions]
    constants = [find_function(name) for name in sources]
    if any(constant is None or constant.op != "Const" for constant in constants):
        return []
    if any(tf.make_ndarray(constant.attr["value"].tensor).any() for constant in constants):
        return []
    tensors = [tf.make_tensor_proto(value, tf.int64) for value in (seed, node_seed)]
    return [(name, "value", tf.compat.v1.AttrValue(tensor=tensor)) for name, tensor in zip(sources, tensors)]


def _seed_functions(graph, seed, second_seed):
    """Gives seeds to the random operators in functions; returns the names of the operators."""
    # Sorted, not by name: the numbers in names count all functions of the process and differ between runs.
    definitions = sorted(
        function_definitions(graph), key=lambda each: [*map(int, re.findall(r"\d+", each.signature.name))]
    )
    names, changed = [], {}
    for position, definition in enumerate(definitions):
        nodes = {node.name: node for node in definition.node_def}
        for node in definition.node_def:
            changes = _find_seed_changes(node, nodes.get, seed, second_seed(f"{position} {node.name}"))
            for name, attribute, value in changes:
                nodes[name].attr[attribute].CopyFrom(value)
            names += [node.name] if changes else []
            if changes:
                changed[definition.signature.name] = definition
    if changed:
        _replace_functions(graph, _add_calling_functions(changed, definitions))
    return names


def _add_calling_functions(changed_functions, definitions):
    """Returns the changed functions and their direct and indirect callers, by name."""
    while True:
        more = {
            each.signature.name: each
            for each in definitions
            if any(
                called.name in changed_functions
                for node in each.node_def
                for called in _function_references(node.attr.values())
            )
        }
        if more.keys() <= changed_functions.keys():
            return changed_functions
        changed_functions = {**changed_functions, **more}


def _function_references(attributes):
    """Yields the function references in attributes of a node; changing a reference changes the node."""
    for attribute in attributes:
        yield from [attribute.func] if attribute.HasField("func") else attribute.list.func


def _replace_functions(graph, changed_functions):
    """Adds changed functions under new names, and makes operators that called the old functions call the new ones."""
    for definition in changed_functions.values():
        definition.signature.name += _SUFFIX
        for node in definition.node_def:
            _rename_references(node.attr.values(), changed_functions)
    library = tf.compat.v1.GraphDef()
    library.versions.CopyFrom(graph.graph_def_versions)
    library.library.function.extend(changed_functions.values())
    with allow_graph_changes(graph), graph.as_default():
        tf.compat.v1.import_graph_def(library, name="")
    for op in graph.get_operations():
        node = op.node_def if any(attribute.type in ("func", "list(func)") for attribute in op.op_def.attr) else None
        for name, attribute in node.attr.items() if node else ():
            if _rename_references([attribute], changed_functions):
                set_attribute(op, name, attribute)


def _rename_references(attributes, new_names):
    renamed = [called for called in _function_references(attributes) if called.name in new_names]
    for called in renamed:
        called.name += _SUFFIX
    return renamed
