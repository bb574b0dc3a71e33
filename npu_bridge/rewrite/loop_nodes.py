"""The nodes of a TF 1 loop around a copy of some operators: a counter, what is handed in, what is computed inside.

Variables, iterators and tables stay outside, where they are shared with the original operators; a loop of this kind can
hand in references as well as resources.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import tensorflow as tf

from npu_bridge.tf_internals.graphs import creation_number, is_reference

LOOP_OPS = frozenset({"Enter", "RefEnter", "LoopCond", "NextIteration", "RefNextIteration"})
_SCOPE = "iteration_loop"


class InGraphLoop(NamedTuple):
    """Training steps as one operator.

    Attributes:
      op: trains them; to be run as a target.
      count: int64 scalar placeholder: how many steps.
      shared: names of operators outside whose kernels the loop draws from. It only does so in a session whose prepared
        graph of a run of `op` has nodes of these names.
    """

    op: tf.Operation
    count: tf.Tensor
    shared: tuple[str, ...] = ()


class NotLoopableError(Exception):
    """Says why a step cannot be copied into a loop.

    Attributes:
      is_only_random: whether random numbers are all that stands against it.
    """

    def __init__(self, reasons: Mapping[tf.Operation, str], is_only_random: bool = False):
        super().__init__(next(iter(reasons.values())))
        self.is_only_random = is_only_random


def ops_inside(step: Iterable[tf.Operation], fed: Collection[str]) -> list[tf.Operation]:
    """What a step computes each time anew: every operator after those it waits for, in the same order on every rank.

    Operators are not made in this order where there are conditions, or where a graph was rewritten.

    Args:
      step: the operators that make up a step.
      fed: names of tensors whose value is given with the run.
    """
    found: dict[str, tf.Operation] = {}
    entered, stack = set(), list(step)
    while stack:
        op = stack[-1]
        if op.name in entered or _is_shared(op):
            stack.pop()
            if op.name in entered:
                found.setdefault(op.name, op)
        else:
            entered.add(op.name)
            controls = sorted(op.control_inputs, key=creation_number)
            waited_for = [*(tensor.op for tensor in op.inputs if tensor.name not in fed), *controls]
            stack.extend(other for other in reversed(waited_for) if other.name not in entered)
    return list(found.values())


def _is_shared(op):
    """Whether an operator only gives access to something that outlives a step: a variable, an iterator, a table."""
    if op.type == "Placeholder":
        return True
    gives_access = op.outputs and all(out.dtype == tf.resource or is_reference(out.dtype) for out in op.outputs)
    return bool(gives_access) and not op.inputs and op.type != "TemporaryVariable"


class LoopNodes:
    """The nodes of a loop that counts up to a limit, one iteration after the other.

    Args:
      inside: the operators to be copied; see `ops_inside`.
      fed: names of tensors whose value is given with the run; every iteration gets the same one.
    Attributes:
      graph_def: the nodes; `count` is the limit, `exit` the end of the counter, `iteration` its value inside.
    """

    def __init__(self, inside: Sequence[tf.Operation], fed: Collection[str]):
        self.graph_def = tf.compat.v1.GraphDef()
        self._fed = fed
        self._inside = {op.name for op in inside}
        self._outer: dict[str, tf.Tensor] = {}
        self._sources: dict[str, str] = {}
        self._add_counter()

    def count_on(self, after: Iterable[str]) -> None:
        """Lets the next iteration begin when some nodes of this one are done."""
        self.add("next_number", "AddV2", ["iteration", "one", *_controls(after)], T=tf.int64)
        self.add("next", "NextIteration", ["next_number"], T=tf.int64)

    def copy(
        self,
        op: tf.Operation,
        name: str = "",
        reads: Sequence[tf.Tensor] | None = None,
        kind: str = "",
    ) -> None:
        """Adds a copy of an operator.

        Args:
          op: one of those inside.
          name: of the node, if it is not what other copies read from.
          reads: tensors that it reads instead of the operator's inputs.
          kind: another type that takes the same inputs and attributes.
        """
        node = self.graph_def.node.add()
        node.CopyFrom(op.node_def)
        node.name, node.op = name or copy_name(op), kind or op.type
        # Placement next to a variable: on a machine without other devices it says nothing.
        node.attr.pop("_class", None)
        tensors = op.inputs if reads is None else reads
        from_inside = any(self._is_computed_inside(tensor) for tensor in tensors)
        controls = [copy_name(other) for other in op.control_inputs if other.name in self._inside]
        if not from_inside and not controls:
            controls = ["iteration"]  # else it would run once more when the loop is over, or not belong to it
        node.input[:] = [*(self.source(tensor) for tensor in tensors), *_controls(controls)]

    def source(self, tensor: tf.Tensor) -> str:
        """Where copies find a tensor of the graph: made by another copy, or handed in."""
        if tensor.name not in self._sources:
            if self._is_computed_inside(tensor):
                self._sources[tensor.name] = f"{copy_name(tensor.op)}:{tensor.value_index}"
            else:
                self._sources[tensor.name] = self._hand_in(tensor)
        return self._sources[tensor.name]

    def replace(self, tensor: tf.Tensor, output: str) -> None:
        """Lets copies that are made from now on read an output of some node for a tensor of the graph."""
        self._sources[tensor.name] = output

    def add(self, name: str, op: str, inputs: Iterable[str], **attributes: Any) -> str:
        """Adds a node and gives its name."""
        node = self.graph_def.node.add(name=name, op=op, input=inputs)
        for key, value in attributes.items():
            node.attr[key].CopyFrom(_attribute(value))
        return name

    def import_into(self, graph: tf.Graph) -> tuple[tf.Operation, tf.Tensor]:
        """Puts the nodes into a graph, under the name scope `iteration_loop`.

        Args:
          graph: where the operators inside are; not finalized.
        Returns:
          The op that is done when the loop is, and the int64 scalar to feed with the number of iterations.
        """
        self.graph_def.versions.CopyFrom(graph.graph_def_versions)
        with graph.as_default(), tf.control_dependencies(None), tf.device(None), tf.name_scope(""):
            op, count = tf.compat.v1.import_graph_def(
                self.graph_def, input_map=self._outer, return_elements=["exit", "count:0"], name=_SCOPE
            )
        return op, count

    def _add_counter(self):
        self.add("count", "Placeholder", [], dtype=tf.int64, shape=tf.TensorShape([]))
        self._add_number("zero", [], 0)
        self._enter("first", "zero", tf.int64, is_constant=False)
        self._enter("limit", "count", tf.int64)
        self.add("number", "Merge", ["first", "next"], T=tf.int64, N=2)
        self.add("is_left", "Less", ["number", "limit"], T=tf.int64)
        self.add("goes_on", "LoopCond", ["is_left"])
        self.add("either", "Switch", ["number", "goes_on"], T=tf.int64)
        self.add("exit", "Exit", ["either"], T=tf.int64)
        self.add("iteration", "Identity", ["either:1"], T=tf.int64)
        self._add_number("one", ["^iteration"], 1)

    def _add_number(self, name, inputs, value):
        self.add(name, "Const", inputs, dtype=tf.int64)
        self.graph_def.node[-1].attr["value"].tensor.CopyFrom(tf.make_tensor_proto(value, tf.int64))

    def _is_computed_inside(self, tensor):
        return tensor.op.name in self._inside and tensor.name not in self._fed

    def _hand_in(self, tensor):
        number = len(self._outer)
        self._outer[f"outer_{number}:0"] = tensor
        self._enter(f"enter_{number}", f"outer_{number}", tensor.dtype)
        return f"enter_{number}"

    def _enter(self, name, source, dtype, is_constant=True):
        # What does not change is there in each iteration.
        kind = "RefEnter" if is_reference(dtype) else "Enter"
        self.add(
            name,
            kind,
            [source],
            T=dtype.base_dtype,
            frame_name=_SCOPE,
            is_constant=is_constant,
            parallel_iterations=1,
        )


def copy_name(op: tf.Operation) -> str:
    """The node that is the copy of an operator."""
    return f"step/{op.name}"


def _controls(nodes):
    return [f"^{node}" for node in dict.fromkeys(nodes)]


def _attribute(value: Any):
    kind = tf.compat.v1.AttrValue
    if isinstance(value, tf.compat.v1.AttrValue):
        return value
    if isinstance(value, tf.DType):
        return kind(type=value.as_datatype_enum)
    if isinstance(value, tf.TensorShape):
        return kind(shape=value.as_proto())
    if isinstance(value, bool):
        return kind(b=value)
    return kind(s=value.encode()) if isinstance(value, str) else kind(i=value)
