"""The pass that puts training steps into a loop of the graph: one op trains as many steps as it is told.

Everything a step computes is copied into the body of a TF 1 loop. Variables, iterators and tables stay outside, where
they are shared with the original step; a loop of this kind can hand in references as well as resources. Its iterations
run strictly one after the other, so the copy computes what running the original step again would.

Not every step can be copied. Some operators keep state in themselves, such as the random number generator of a
dropout: a copy would have its own and repeat numbers. Others belong to the ranks. For such steps the pass changes
nothing and says why.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import Any, NamedTuple

import tensorflow as tf

_SCOPE = "iteration_loop"
_LOOP_OPS = frozenset({"Enter", "RefEnter", "LoopCond", "NextIteration", "RefNextIteration"})
# Marked as stateful, but what they keep is in a variable, an iterator or a table.
_STATE_ELSEWHERE = (
    "Assert",
    "Assign",
    "DeepCopy",
    "IteratorGetNext",
    "LookupTable",
    "Print",
    "ReadVariableOp",
    "Resource",
    "VarIsInitializedOp",
)
# Their state is a generator of random numbers in the operator itself.
_RANDOM = frozenset(
    {
        "Multinomial",
        "ParameterizedTruncatedNormal",
        "RandomGamma",
        "RandomPoissonV2",
        "RandomShuffle",
        "RandomStandardNormal",
        "RandomUniform",
        "RandomUniformInt",
        "TruncatedNormal",
    }
)
# They negotiate by name: a copy would be another participant.
_AMONG_RANKS = ("Collective", "Horovod", "Nccl")


class InGraphLoop(NamedTuple):
    """Training steps as one operator.

    Attributes:
      op: trains them; to be run as a target.
      count: int64 scalar placeholder: how many steps.
    """

    op: tf.Operation
    count: tf.Tensor


class NotLoopableError(Exception):
    """Says why a step cannot be copied into a loop.

    Attributes:
      is_only_random: whether random numbers are all that stands against it.
    """

    def __init__(self, reasons: dict[tf.Operation, str]):
        super().__init__(next(iter(reasons.values())))
        self.is_only_random = all(op.type in _RANDOM for op in reasons)


def put_in_loop(graph: tf.Graph, step: Iterable[tf.Operation], fed: Collection[str] = ()) -> InGraphLoop:
    """Makes a loop whose every iteration does what running some operators does.

    Args:
      graph: a TF 1 graph that is not finalized.
      step: the operators that make up a training step.
      fed: names of tensors whose value is given with the run; every iteration gets the same one.
    Raises:
      NotLoopableError: the step holds something that a copy would not be equal to. The graph is as it was.
    Graph: name scope `iteration_loop`, with a copy of all that the step computes.
    Ranks: local.
    """
    step, fed = list(step), frozenset(fed)
    inside = _ops_inside(step, fed)
    reasons = {op: reason for op in inside if (reason := _reason_against_a_copy(op))}
    if reasons:
        raise NotLoopableError(reasons)
    loop = _Loop(graph.graph_def_versions, inside, fed)
    loop.close(step)
    with graph.as_default(), tf.control_dependencies(None), tf.device(None), tf.name_scope(""):
        op, count = tf.compat.v1.import_graph_def(
            loop.graph_def, input_map=loop.outer, return_elements=["exit", "count:0"], name=_SCOPE
        )
    return InGraphLoop(op, count)


def _ops_inside(step, fed):
    """What a step computes each time anew, in the order the operators were made."""
    found, stack = {}, list(step)
    while stack:
        op = stack.pop()
        if op.name not in found and not _is_shared(op):
            found[op.name] = op
            stack.extend(tensor.op for tensor in op.inputs if tensor.name not in fed)
            stack.extend(op.control_inputs)
    return sorted(found.values(), key=lambda op: op._id)


def _is_shared(op):
    """Whether an operator only gives access to something that outlives a step: a variable, an iterator, a table."""
    if op.type == "Placeholder":
        return True
    gives_access = op.outputs and all(out.dtype == tf.resource or out.dtype._is_ref_dtype for out in op.outputs)
    return bool(gives_access) and not op.inputs and op.type != "TemporaryVariable"


def _reason_against_a_copy(op):
    if op.type in _LOOP_OPS:
        return f"{op.name} is part of a loop of its own"
    if op.type.startswith(_AMONG_RANKS):
        return f"{op.name} ({op.type}) belongs to all ranks"
    if op.op_def.is_stateful and not op.type.startswith(_STATE_ELSEWHERE):
        return f"{op.name} ({op.type}) keeps state in itself"
    return ""


class _Loop:
    """The nodes of a loop that counts up to a limit.

    Attributes:
      graph_def: the nodes; `count` is the limit, `exit` the end.
      outer: tensors of the graph by the names the nodes know them under.
    """

    def __init__(self, versions, inside, fed):
        self.graph_def = tf.compat.v1.GraphDef(versions=versions)
        self.outer: dict[str, tf.Tensor] = {}
        self._fed = fed
        self._entrances: dict[str, str] = {}
        self._inside = {op.name for op in inside}
        self._add_counter()
        for op in inside:
            self._copy(op)

    def close(self, step):
        """Lets the next iteration begin when this one's step is done."""
        done = [f"^{_inner(op)}" for op in step]
        self._node("next_number", "AddV2", ["iteration", "one", *done], T=tf.int64)
        self._node("next", "NextIteration", ["next_number"], T=tf.int64)

    def _add_counter(self):
        self._node("count", "Placeholder", [], dtype=tf.int64, shape=tf.TensorShape([]))
        self._number("zero", [], 0)
        self._enter("first", "zero", tf.int64, is_constant=False)
        self._enter("limit", "count", tf.int64)
        self._node("number", "Merge", ["first", "next"], T=tf.int64, N=2)
        self._node("is_left", "Less", ["number", "limit"], T=tf.int64)
        self._node("goes_on", "LoopCond", ["is_left"])
        self._node("either", "Switch", ["number", "goes_on"], T=tf.int64)
        self._node("exit", "Exit", ["either"], T=tf.int64)
        self._node("iteration", "Identity", ["either:1"], T=tf.int64)
        self._number("one", ["^iteration"], 1)

    def _number(self, name, inputs, value):
        self._node(name, "Const", inputs, dtype=tf.int64)
        self.graph_def.node[-1].attr["value"].tensor.CopyFrom(tf.make_tensor_proto(value, tf.int64))

    def _copy(self, op):
        node = self.graph_def.node.add()
        node.CopyFrom(op.node_def)
        node.name = _inner(op)
        # Placement next to a variable: on a machine without other devices it says nothing.
        node.attr.pop("_class", None)
        from_inside = [tensor for tensor in op.inputs if self._is_computed_inside(tensor)]
        waited = [f"^{_inner(other)}" for other in op.control_inputs if other.name in self._inside]
        if not from_inside and not waited:
            waited = ["^iteration"]  # else it would run once more when the loop is over, or not belong to it
        node.input[:] = [*(self._source(tensor) for tensor in op.inputs), *waited]

    def _is_computed_inside(self, tensor):
        return tensor.op.name in self._inside and tensor.name not in self._fed

    def _source(self, tensor):
        if self._is_computed_inside(tensor):
            return f"{_inner(tensor.op)}:{tensor.value_index}"
        if tensor.name not in self._entrances:
            number = len(self._entrances)
            self.outer[f"outer_{number}:0"] = tensor
            self._entrances[tensor.name] = f"enter_{number}"
            self._enter(f"enter_{number}", f"outer_{number}", tensor.dtype)
        return self._entrances[tensor.name]

    def _enter(self, name, source, dtype, is_constant=True):
        # One iteration at a time; what does not change is there in each of them.
        kind = "RefEnter" if dtype._is_ref_dtype else "Enter"
        attributes = {"frame_name": _SCOPE, "is_constant": is_constant, "parallel_iterations": 1}
        self._node(name, kind, [source], T=dtype.base_dtype, **attributes)

    def _node(self, name, op, inputs, **attributes):
        node = self.graph_def.node.add(name=name, op=op, input=inputs)
        for key, value in attributes.items():
            node.attr[key].CopyFrom(_attribute(value))


def _inner(op):
    return f"step/{op.name}"


def _attribute(value: Any):
    kind = tf.compat.v1.AttrValue
    if isinstance(value, tf.DType):
        return kind(type=value.as_datatype_enum)
    if isinstance(value, tf.TensorShape):
        return kind(shape=value.as_proto())
    if isinstance(value, bool):
        return kind(b=value)
    return kind(s=value.encode()) if isinstance(value, str) else kind(i=value)
