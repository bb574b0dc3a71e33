"""Rounds inputs and outputs of operators to 16 bits, while the operators compute in float32.

Pairs of casts, to the low dtype and back, go into the graph itself, before a session runs the operators: TensorFlow
ignores later changes. So the graph shows the rounding.

A guard, a boolean scalar, chooses at each run between the rounded value and the exact one: sessions that do not feed it
compute without rounding. Operators that call functions run with rounded copies of these under a guard.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

import tensorflow as tf

from npu_bridge.base.errors import say_once
from npu_bridge.base.tf_internals.graphs import (
    add_control_inputs,
    control_flow_context,
    control_outputs,
    function_definitions,
    inside_control_flow_context,
    opened_for_changes,
    remove_control_inputs,
    set_attribute,
    update_input,
)
from npu_bridge.session.precision.operator_dtypes import OperatorDtypes, Rounding
from npu_bridge.session.precision.rounded_functions import RoundedFunctions, calls_of
from npu_bridge.session.precision.type_lists import EXACT

_KEY = ("npu_bridge", "rounded_values")  # TensorFlow exports collections with text keys only
_LAYER = "_npu_bridge_rounds"  # an attribute of operators that round: the layer they belong to
_WORD = "/rounded_"  # in the name of each operator that rounds
_OUTPUT = f"{_WORD}output_"
_LOOPS = ("StatelessWhile", "While")
BY_RULES = "rules"  # the layer of `customize_dtypes`, which has no guard


class Layer:
    """The rounding that one module has put into a graph.

    Attributes:
      name: name of the layer, as marked on its operators.
      guard: boolean scalar that turns the rounding on; None if it is always on.
      seen_ops: the number of operators of the graph that are processed.
      replaced: by reference of an original output, the tensor that consumers read in its place.
      found: names of the operators around which it rounds.
      calls: by operator that calls functions, and by reference of its outputs, the element a run asks for in its place.
    """

    def __init__(self, name: str, guard: tf.Tensor | None):
        self.name, self.guard = name, guard
        self.seen_ops = 0
        self.replaced: dict = {}
        self.found: frozenset[str] = frozenset()
        self.calls: dict = {}
        self._inputs: dict = {}
        self._are_rounded: set = set()

    def round_operators(self, ops: Iterable[tf.Operation], rule_of: Callable[[tf.Operation], Rounding | None]) -> None:
        """Rounds around operators of a graph that is open for changes; each is given once, in order of creation."""
        for op in ops:
            if is_own(op):
                continue
            rule = rule_of(op)
            for position, tensor in enumerate(op.inputs):
                tensor = self.replaced.get(tensor.ref(), tensor)
                if rule is not None and position < len(rule.inputs) and _is_exact(tensor, rule.inputs[position]):
                    tensor = self._rounded_input(op, position, tensor, rule.inputs[position])
                if tensor is not op.inputs[position]:
                    update_input(op, position, tensor)
            if rule is not None:
                self._round_outputs(op, rule)

    def replace_calls(self, op: tf.Operation, functions: Mapping[str, str]) -> None:
        """Makes an operator call other functions, by name, under the guard."""
        name = f"{op.name}{_WORD}call"
        with _where(op):
            pairs = [
                tf.raw_ops.Switch(data=tensor, pred=self.guard, name=f"{name}/input") for tensor in list(op.inputs)
            ]
            pivots = tf.raw_ops.Switch(data=self.guard, pred=self.guard, name=f"{name}/guard")
            plain, rounded = (
                tf.identity(pivot, f"{name}/is_on") for pivot in (pivots.output_false, pivots.output_true)
            )
            with tf.control_dependencies([*op.control_inputs, rounded.op]):
                other = op.graph.create_op(
                    op.type,
                    [pair.output_true for pair in pairs],
                    [tensor.dtype for tensor in op.outputs],
                    name=name,
                    attrs=_with_functions(op, functions),
                )
            readers = [list(tensor.consumers()) for tensor in op.outputs]
            waiting = control_outputs(op)
            # Inputs added to a loop with its gradient cannot be changed; the loop waits for the pivot as a whole.
            for position, pair in enumerate(pairs if op.type not in _LOOPS else ()):
                update_input(op, position, pair.output_false)
            add_control_inputs(op, [plain.op])
            merged = [
                tf.raw_ops.Merge(inputs=list(both), name=f"{name}/output").output
                for both in zip(op.outputs, other.outputs)
            ]
            ends = []
            for one, pivot in ((op, plain), (other, rounded)):
                with tf.control_dependencies([one]):
                    ends.append(tf.identity(pivot, f"{name}/is_done"))
            done = tf.raw_ops.Merge(inputs=ends, name=f"{name}/done").output.op
        own = [part.op for pair in pairs for part in pair] + [merge.op for merge in merged]
        for each in [*own, pivots.output_true.op, plain.op, rounded.op, other, *(end.op for end in ends), done]:
            self._mark(each)
        self.calls[op] = done
        for tensor, merge, users in zip(op.outputs, merged, readers):
            self.calls[tensor.ref()] = merge
            self._redirect(tensor, merge, users)
        for user in waiting:
            others = [each for each in user.control_inputs if each is not op]
            remove_control_inputs(user)
            add_control_inputs(user, [*others, done])

    def _rounded_input(self, op, position, tensor, dtype):
        if tensor.ref() in self._are_rounded or _layer_of(tensor.op) == self.name:
            return tensor
        key = (tensor.ref(), op.device, id(control_flow_context(op)))
        if key not in self._inputs:
            self._inputs[key] = self._rounded(tensor, dtype, op, f"input_{position}")
        return self._inputs[key]

    def _round_outputs(self, op, rule):
        for position, (tensor, dtype) in enumerate(zip(op.outputs, rule.outputs)):
            if not _is_exact(tensor, dtype):
                continue
            consumers = list(tensor.consumers())
            if any(_OUTPUT in user.name and _layer_of(user) == self.name for user in consumers):
                continue  # it is a copy, and so is the rounding after it
            if op.type in EXACT and _rounds_all_inputs(op, rule):
                self._are_rounded.add(tensor.ref())
                continue
            self._redirect(tensor, self._rounded(tensor, dtype, op, f"output_{position}"), consumers)

    def _redirect(self, tensor, replacement, consumers):
        """Makes present and future consumers of a tensor read another one."""
        self.replaced[tensor.ref()] = replacement
        for consumer in consumers:
            for place, taken in enumerate(consumer.inputs):
                if taken is tensor:
                    update_input(consumer, place, replacement)

    def _rounded(self, tensor, dtype, op, which):
        """Casts a value to the low dtype and back, on the device and in the loop or condition of an operator."""
        name = f"{op.name}{_WORD}{which}"
        with _where(op):
            if self.guard is None:
                parts = [tf.cast(tensor, dtype, name=f"{name}/{dtype}")]
                parts.append(tf.cast(parts[0], tensor.dtype.base_dtype, name=name))
            else:
                off, on = tf.raw_ops.Switch(data=tensor, pred=self.guard, name=f"{name}/guard")
                low = tf.cast(on, dtype, name=f"{name}/{dtype}")
                back = tf.cast(low, tensor.dtype.base_dtype, name=f"{name}/float32")
                parts = [off, low, back, tf.raw_ops.Merge(inputs=[off, back], name=name).output]
        for part in parts:
            self._mark(part.op)
        return parts[-1]

    def _mark(self, op):
        mark_as_own(op, self.name)


def round_values(dtypes: OperatorDtypes, graph: tf.Graph) -> None:
    """Adds the roundings of a file of rules to the new operators of a graph, finalized or not.

    The rules of the first call hold for a graph: each operator is changed once.

    Graph: two casts named `<operator>/rounded_...` for each rounded value.
    """
    if not dtypes.rounds:
        return
    with new_operators(graph, BY_RULES, lambda: None) as (layer, ops):
        if ops:
            _warn_about_functions(dtypes, graph)
        layer.round_operators(
            ops, lambda op: dtypes.rounding_by_name.get(op.name) or dtypes.rounding_by_type.get(op.type)
        )


@contextlib.contextmanager
def new_operators(
    graph: tf.Graph, name: str, make_guard: Callable[[], tf.Tensor | None]
) -> Iterator[tuple[Layer, Sequence[tf.Operation]]]:
    """Yields a layer of a graph and the operators new to it; in the block the graph can be changed."""
    layers = layers_of(graph)
    if name not in layers:
        with opened_for_changes(graph):
            layers[name] = Layer(name, make_guard())
    layer = layers[name]
    ops = graph.get_operations()
    new_ops = ops[layer.seen_ops :]
    if not new_ops:
        yield layer, ()
        return
    with opened_for_changes(graph):
        yield layer, new_ops
    layer.seen_ops = len(graph.get_operations())


def layers_of(graph: tf.Graph) -> dict[str, Layer]:
    """Returns the layers of rounding in a graph, by name."""
    found = graph.get_collection_ref(_KEY)
    if not found:
        found.append({})
    return found[0]


def is_own(op: tf.Operation) -> bool:
    """Returns whether an operator was inserted to round a value, or is a copy of such an operator."""
    return _layer_of(op) is not None


def operator_behind(op: tf.Operation) -> tf.Operation:
    """Returns the operator whose values this one rounds; the operator itself if it does not round."""
    return op.graph.get_operation_by_name(op.name[: op.name.rindex(_WORD)]) if is_own(op) else op


def mark_as_own(op: tf.Operation, layer: str) -> None:
    """Marks an operator, whose name has `/rounded_` in it, as inserted by a layer."""
    set_attribute(op, _LAYER, tf.compat.v1.AttrValue(s=layer.encode()))


def unrounded(tensor: tf.Tensor) -> tf.Tensor:
    """Returns the tensor from which a rounded one was made; an unrounded one itself."""
    while tensor.op.type in ("Cast", "Merge", "Switch") and is_own(tensor.op):
        tensor = tensor.op.inputs[0]
    return tensor


def round_calls(functions: RoundedFunctions, layer: Layer, ops: Iterable[tf.Operation]) -> None:
    """Replaces the functions that operators call by rounded ones under a layer's guard."""
    for op in ops:
        names = {} if is_own(op) else {name: functions.rounded(name) for name in calls_of(op)}
        if any(name != other for name, other in names.items()):
            functions.add_to(op.graph)
            layer.replace_calls(op, names)


@contextlib.contextmanager
def _where(op: tf.Operation) -> Iterator[None]:
    """Opens the device and control-flow context of an operator, without a name scope, for new operators."""
    graph = op.graph
    with graph.as_default(), tf.control_dependencies(None), tf.name_scope(""), tf.device(op.device or None):
        with inside_control_flow_context(graph, control_flow_context(op)):
            yield


def _with_functions(op, functions):
    attributes = {name: value for name, value in op.node_def.attr.items() if name != "_class"}
    for value in attributes.values():
        for function in [value.func] if value.HasField("func") else value.list.func:
            function.name = functions.get(function.name, function.name)
    return attributes


def _layer_of(op: tf.Operation) -> str | None:
    if _WORD not in op.name:
        return None
    try:
        return op.get_attr(_LAYER).decode()
    except ValueError:
        return None


def _rounds_all_inputs(op: tf.Operation, rule: Rounding) -> bool:
    read = [place for place, tensor in enumerate(op.inputs) if tensor.dtype.base_dtype == tf.float32]
    return bool(read) and all(place < len(rule.inputs) and rule.inputs[place] is not None for place in read)


def _is_exact(tensor: tf.Tensor, dtype: str | None) -> bool:
    return dtype is not None and tensor.dtype.base_dtype == tf.float32


def _warn_about_functions(dtypes: OperatorDtypes, graph: tf.Graph) -> None:
    inside = {node.op for function in function_definitions(graph) for node in function.node_def}
    missed = sorted(inside & set(dtypes.rounding_by_type))
    if missed:
        say_once(
            logging.WARNING,
            f"customize_dtypes: operators inside functions are not rounded. Expected loops and conditions without "
            f"functions; got {', '.join(missed)} inside. Call tf.disable_control_flow_v2() before the graph is built.",
        )
