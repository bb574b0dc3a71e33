"""Rounds inputs and outputs of operators to 16 bits, while the operators compute in float32.

Pairs of casts, to the low dtype and back, are added to the graph before a session runs the operators, because
TensorFlow ignores later changes. So the rounding is visible in the graph.

A guard (a boolean scalar) chooses in each run between the rounded and the exact value. Sessions that do not feed the
guard compute without rounding. Under a guard, operators that call functions call rounded copies of the functions.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

import tensorflow as tf

from npu_bridge.base import kept_in_graph
from npu_bridge.base.errors import say_once
from npu_bridge.base.tf_internals.graphs import (
    add_control_inputs,
    allow_graph_changes,
    control_flow_context,
    control_outputs,
    enter_control_flow_context,
    function_definitions,
    remove_control_inputs,
    set_attribute,
    update_input,
)
from npu_bridge.session.precision.operator_dtypes import OperatorDtypes, Rounding
from npu_bridge.session.precision.rounded_functions import RoundedFunctions, functions_run_by
from npu_bridge.session.precision.type_lists import EXACT

_KEY = ("npu_bridge", "rounded_values")  # TensorFlow exports collections with text keys only
_LAYER = "_npu_bridge_rounds"  # an attribute of operators that round: the layer they belong to
_WORD = "/rounded_"  # in the name of each operator that rounds
_OUTPUT = f"{_WORD}output_"
_LOOPS = ("StatelessWhile", "While")
BY_RULES = "rules"  # the layer of `customize_dtypes`, which has no guard


class RoundingLayer:
    """The operators for rounding that one module has added to a graph.

    Attributes:
      name: name of the layer, as marked on its operators.
      guard: boolean scalar that turns the rounding on; None if it is always on.
      seen_ops: number of operators of the graph that have been processed.
      replaced: dict from the `ref()` of an operator's output to the tensor that consumers of the output read instead.
      rounded_ops: names of the operators whose inputs or outputs are rounded.
      replaced_calls: dict from an operator that calls functions, or from the `ref()` of its output, to the operator or
        tensor that session runs use instead.
    """

    def __init__(self, name: str, guard: tf.Tensor | None):
        self.name, self.guard = name, guard
        self.seen_ops = 0
        self.replaced: dict = {}
        self.rounded_ops: frozenset[str] = frozenset()
        self.replaced_calls: dict = {}
        self._inputs: dict = {}
        self._rounded_to: dict = {}

    def round_operators(self, ops: Iterable[tf.Operation], rule_of: Callable[[tf.Operation], Rounding | None]) -> None:
        """Adds rounding to operators of a graph open for changes; pass each operator once, in order of creation."""
        for op in ops:
            if is_rounding_op(op):
                continue
            rule = rule_of(op)
            for position, tensor in enumerate(op.inputs):
                tensor = self.replaced.get(tensor.ref(), tensor)
                if rule is not None and position < len(rule.inputs) and _needs_rounding(tensor, rule.inputs[position]):
                    tensor = self._add_input_rounding(op, position, tensor, rule.inputs[position])
                if tensor is not op.inputs[position]:
                    update_input(op, position, tensor)
            if rule is not None:
                self._round_outputs(op, rule)

    def replace_calls(self, op: tf.Operation, functions: Mapping[str, str]) -> None:
        """Makes an operator call other functions if the guard is True; `functions` maps old to new names."""
        name = f"{op.name}{_WORD}call"
        with _place_ops_like(op):
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
                    attrs=_attributes_calling(op, functions),
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
            self._mark_as_rounding_op(each)
        self.replaced_calls[op] = done
        for tensor, merge, users in zip(op.outputs, merged, readers):
            self.replaced_calls[tensor.ref()] = merge
            self._redirect(tensor, merge, users)
        for user in waiting:
            others = [each for each in user.control_inputs if each is not op]
            remove_control_inputs(user)
            add_control_inputs(user, [*others, done])

    def _add_input_rounding(self, op, position, tensor, dtype):
        is_rounded = tensor.ref() in self._rounded_to or _layer_of(tensor.op) == self.name
        if is_rounded and self._rounded_to.get(tensor.ref(), dtype) == dtype:
            return tensor
        key = (tensor.ref(), dtype, op.device, id(control_flow_context(op)))
        if key not in self._inputs:
            self._inputs[key] = self._add_casts(tensor, dtype, op, f"input_{position}")
        return self._inputs[key]

    def _round_outputs(self, op, rule):
        for position, (tensor, dtype) in enumerate(zip(op.outputs, rule.outputs)):
            if not _needs_rounding(tensor, dtype):
                continue
            consumers = list(tensor.consumers())
            if any(_OUTPUT in user.name and _layer_of(user) == self.name for user in consumers):
                continue  # it is a copy, and so is the rounding after it
            if op.type in EXACT and _rounds_all_inputs(op, rule):
                self._rounded_to[tensor.ref()] = dtype
                continue
            rounded = self._add_casts(tensor, dtype, op, f"output_{position}")
            self._rounded_to[rounded.ref()] = dtype
            self._redirect(tensor, rounded, consumers)

    def _redirect(self, tensor, replacement, consumers):
        """Makes present and future consumers of a tensor read another tensor."""
        self.replaced[tensor.ref()] = replacement
        for consumer in consumers:
            for place, taken in enumerate(consumer.inputs):
                if taken is tensor:
                    update_input(consumer, place, replacement)

    def _add_casts(self, tensor, dtype, op, value_name):
        """Casts a value to the low dtype and back, on an operator's device and in its control-flow context."""
        name = f"{op.name}{_WORD}{value_name}"
        with _place_ops_like(op):
            if self.guard is None:
                parts = [tf.cast(tensor, dtype, name=f"{name}/{dtype}")]
                parts.append(tf.cast(parts[0], tensor.dtype.base_dtype, name=name))
            else:
                off, on = tf.raw_ops.Switch(data=tensor, pred=self.guard, name=f"{name}/guard")
                low = tf.cast(on, dtype, name=f"{name}/{dtype}")
                back = tf.cast(low, tensor.dtype.base_dtype, name=f"{name}/float32")
                parts = [off, low, back, tf.raw_ops.Merge(inputs=[off, back], name=name).output]
        for part in parts:
            self._mark_as_rounding_op(part.op)
        return parts[-1]

    def _mark_as_rounding_op(self, op):
        mark_as_rounding_op(op, self.name)


def round_values_by_rules(dtypes: OperatorDtypes, graph: tf.Graph) -> None:
    """Adds the rounding of `customize_dtypes` to the new operators of a graph, even of a finalized graph.

    Each operator is changed once, so rules of a later call apply to later operators only.

    Graph: two casts named `<operator>/rounded_...` for each rounded value.
    """
    if not dtypes.has_rounding:
        return
    with edit_new_operators(graph, BY_RULES, lambda: None) as (layer, ops):
        if ops:
            _warn_about_functions(dtypes, graph)
        layer.round_operators(
            ops, lambda op: dtypes.rounding_by_name.get(op.name) or dtypes.rounding_by_type.get(op.type)
        )


@contextlib.contextmanager
def edit_new_operators(
    graph: tf.Graph, layer_name: str, make_guard: Callable[[], tf.Tensor | None]
) -> Iterator[tuple[RoundingLayer, Sequence[tf.Operation]]]:
    """Yields a rounding layer of a graph and the operators new to this layer; in the block the graph can be changed."""
    layers = layers_of(graph)
    with allow_graph_changes(graph):  # sessions of the graph in other threads wait
        if layer_name not in layers:
            layers[layer_name] = RoundingLayer(layer_name, make_guard())
        layer, ops = layers[layer_name], graph.get_operations()
        yield layer, ops[layer.seen_ops :]
        layer.seen_ops = len(ops)  # later ones are new next time: this layer's own, and those of other threads


def layers_of(graph: tf.Graph) -> dict[str, RoundingLayer]:
    """Returns the rounding layers of a graph by name."""
    return kept_in_graph.find_or_make(graph, _KEY, dict)


def is_rounding_op(op: tf.Operation) -> bool:
    """Returns whether an operator was inserted to round a value, or is a copy of such an operator."""
    return _layer_of(op) is not None


def operator_rounded_by(op: tf.Operation) -> tf.Operation:
    """Returns the operator whose values a rounding operator rounds; any other operator is returned itself."""
    return op.graph.get_operation_by_name(op.name[: op.name.rindex(_WORD)]) if is_rounding_op(op) else op


def mark_as_rounding_op(op: tf.Operation, layer: str) -> None:
    """Marks an operator, whose name must contain `/rounded_`, as inserted by a rounding layer."""
    set_attribute(op, _LAYER, tf.compat.v1.AttrValue(s=layer.encode()))


def tensor_before_rounding(tensor: tf.Tensor) -> tf.Tensor:
    """Returns the original of a rounded tensor; any other tensor is returned itself."""
    while tensor.op.type in ("Cast", "Merge", "Switch") and is_rounding_op(tensor.op):
        tensor = tensor.op.inputs[0]
    return tensor


def call_rounded_functions(functions: RoundedFunctions, layer: RoundingLayer, ops: Iterable[tf.Operation]) -> None:
    """Makes operators call rounded copies of their functions if the guard of a rounding layer is True."""
    for op in ops:
        names = {} if is_rounding_op(op) else {name: functions.rounded_name(name) for name in functions_run_by(op)}
        if any(name != other for name, other in names.items()):
            functions.add_definitions_to(op.graph)
            layer.replace_calls(op, names)


@contextlib.contextmanager
def _place_ops_like(op: tf.Operation) -> Iterator[None]:
    """Creates the operators of a block on an operator's device and in its control-flow context, without name scope."""
    graph = op.graph
    with graph.as_default(), tf.control_dependencies(None), tf.name_scope(""), tf.device(op.device or None):
        with enter_control_flow_context(graph, control_flow_context(op)):
            yield


def _attributes_calling(op, functions):
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


def _needs_rounding(tensor: tf.Tensor, dtype: str | None) -> bool:
    return dtype is not None and tensor.dtype.base_dtype == tf.float32


def _warn_about_functions(dtypes: OperatorDtypes, graph: tf.Graph) -> None:
    inside = {node.op for function in function_definitions(graph) for node in function.node_def}
    missed = sorted(inside & set(dtypes.rounding_by_type))
    if missed:
        say_once(
            logging.WARNING,
            f"customize_dtypes: operators inside functions are not rounded. Expected loops and conditions without "
            f"functions; got functions with {', '.join(missed)}. Call tf.disable_control_flow_v2() before you "
            f"build the graph.",
        )
