"""Copies a training step into a `while_loop` of its graph, so that one operator trains several steps in a row.

Variables, iterators and tables stay outside the loop, which shares them with the original step. Iterations run strictly
one after the other, so a loop computes the same as repeated runs of the original step. A step is not copied, and the
reason is reported, if one of its operators keeps state in itself (a seeded random operator, say), is a collective, or
is part of a loop already.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Sequence
from typing import NamedTuple

import tensorflow as tf
from tensorflow.core.framework import attr_value_pb2

from npu_bridge.base.tf_internals.graphs import is_reference, set_attribute
from npu_bridge.graph.control_flow import classic_control_flow
from npu_bridge.graph.operators import computed_ops

tf1 = tf.compat.v1
_SCOPE = "iteration_loop"
LOOP_TYPES = frozenset({"Enter", "RefEnter", "LoopCond", "NextIteration", "RefNextIteration"})
# Operators that negotiate by name among ranks: a copy would be a second participant.
COLLECTIVE_TYPES = ("Collective", "Horovod", "Nccl")
_REPEATABLE_COLLECTIVES = re.compile("Horovod|Collective.*V2$")
# Marked as stateful, but their state is in a variable, an iterator or a table.
_STATE_IN_RESOURCES = (
    "Assert",
    "Assign",
    "DeepCopy",
    "IteratorGetNext",
    "LookupTable",
    "Print",
    "ReadVariableOp",
    "Resource",
    "VarIsInitializedOp",
    "VariableShape",
)
_REPEATABLE = "_npu_bridge_repeatable"
_SHARED = "_npu_bridge_shared"
# Random operators that keep their generator's state. Without a seed, the different numbers of a copy are as good.
_RANDOM_TYPES = frozenset(
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


class NotLoopableError(Exception):
    """Raised when a step cannot be copied into a loop; the message gives the reason.

    Attributes:
      is_only_random: whether seeded random operators are the only reason.
    """

    def __init__(self, reasons: dict[tf.Operation, str]):
        super().__init__(next(iter(reasons.values())))
        self.is_only_random = all(op.type in _RANDOM_TYPES for op in reasons)


class InGraphLoop(NamedTuple):
    """A loop of training steps that runs as one operator.

    Attributes:
      op: the operator to run, which trains the steps.
      count: int64 scalar placeholder, the number of steps.
      transfers: in a loop of overlapping steps, the copies of collective operators, by the name of the original.
    """

    op: tf.Operation
    count: tf.Tensor
    transfers: dict[str, tf.Operation] = {}


def put_in_loop(graph: tf.Graph, step: Iterable[tf.Operation], fed_names: Collection[str] = ()) -> InGraphLoop:
    """Builds a loop in which every iteration does the same as a run of the operators in `step`.

    Args:
      graph: a TF 1 graph that is not finalized.
      step: the operators that make up a training step.
      fed_names: names of the tensors fed in the run; every iteration gets the same values.
    Raises:
      NotLoopableError: a copy of some operator would not be equivalent. The graph is unchanged.
    Graph: name scope `iteration_loop`, with a copy of all that the step computes.
    Ranks: local.
    """
    step, fed_names = list(step), frozenset(fed_names)
    copied = ops_to_copy(step, fed_names)
    definition, outer = export_definition(graph, copied, fed_names)

    def train_once(number):
        done = tf1.import_graph_def(definition, outer, [op.name for op in step], name="step")
        with tf.control_dependencies(done):
            return number + 1

    with graph.as_default(), tf.control_dependencies(None), tf.device(None), tf.name_scope(""):
        with tf.name_scope(_SCOPE), classic_control_flow():
            count = tf1.placeholder(tf.int64, [], name="count")
            start = tf.constant(0, tf.int64)
            reached = tf1.while_loop(lambda number: number < count, train_once, [start], parallel_iterations=1)
    return InGraphLoop(reached.op, count)


def ops_to_copy(
    step: Iterable[tf.Operation], fed_names: Collection[str], with_collectives: bool = False
) -> list[tf.Operation]:
    """Returns the operators of a training step that a loop must copy, each after its inputs.

    The loop uses all other operators of the step, such as variables, without a copy.

    Args:
      step: the operators that make up a training step.
      fed_names: names of the tensors fed in the run.
      with_collectives: copy collective operators, too; then all ranks must do the same.
    Raises:
      NotLoopableError: a copy of some operator would not be equivalent.
    """
    copied = [op for op in computed_ops(step, fed_names) if not _is_shared(op)]
    reasons = {op: reason for op in copied if (reason := _reason_not_to_copy(op, with_collectives))}
    if reasons:
        raise NotLoopableError(reasons)
    return copied


def allow_copies(op: tf.Operation) -> tf.Operation:
    """Marks a Python operator (a `py_function`) as safe to copy; returns the operator."""
    set_attribute(op, _REPEATABLE, attr_value_pb2.AttrValue(b=True))
    return op


def mark_shared_by_copies(op: tf.Operation) -> tf.Operation:
    """Marks an operator without inputs: copies of a step then read the original, which can be fed. Returns the op."""
    set_attribute(op, _SHARED, attr_value_pb2.AttrValue(b=True))
    return op


def name_of_outer_tensor(tensor: tf.Tensor) -> str:
    """Returns the name that `export_definition` gives to a tensor from outside of the exported operators."""
    return f"outer_{tensor.name.replace(':', '_')}:0"


def export_definition(
    graph: tf.Graph, copied_ops: Sequence[tf.Operation], fed_names: Collection[str] = (), keeps_order: bool = True
) -> tuple[tf.compat.v1.GraphDef, dict[str, tf.Tensor]]:
    """Returns a GraphDef of `copied_ops`, and the outside tensors that these operators read, by name in the GraphDef.

    Tensors that are fed count as outside even if an exported operator computes them. With `keeps_order`, exported
    operators keep the control inputs from other exported operators.
    """
    definition, outer = tf1.GraphDef(), {}
    definition.versions.CopyFrom(graph.graph_def_versions)
    inside = {op.name for op in copied_ops}

    def name_inside(tensor):
        if tensor.op.name in inside and tensor.name not in fed_names:
            return tensor.name
        outer[name_of_outer_tensor(tensor)] = tensor
        return name_of_outer_tensor(tensor)

    for op in copied_ops:
        node = definition.node.add()
        node.CopyFrom(op.node_def)
        # Colocation with a variable has no meaning on a machine without other devices.
        node.attr.pop("_class", None)
        controls = [f"^{other.name}" for other in op.control_inputs if keeps_order and other.name in inside]
        node.input[:] = [*map(name_inside, op.inputs), *controls]
    return definition, outer


def _is_shared(op):
    """Returns whether copies read the original operator: a placeholder, or access to a variable, iterator or table."""
    if op.inputs:
        return False
    if op.type == "Placeholder" or _is_marked(op, _SHARED):
        return True
    gives_access = op.outputs and all(out.dtype == tf.resource or is_reference(out.dtype) for out in op.outputs)
    return bool(gives_access) and op.type != "TemporaryVariable"


def _reason_not_to_copy(op, with_collectives):
    if op.type in LOOP_TYPES:
        return f"{op.name} is part of a loop of its own"
    if op.type.startswith(COLLECTIVE_TYPES):
        if with_collectives and _REPEATABLE_COLLECTIVES.match(op.type):
            return ""
        return f"{op.name} ({op.type}) is a collective operator"
    if op.type.startswith(_STATE_IN_RESOURCES) or not op.op_def.is_stateful:
        return ""
    is_unseeded = op.type in _RANDOM_TYPES and op.get_attr("seed") == op.get_attr("seed2") == 0
    is_harmless = is_unseeded or _is_marked(op, _REPEATABLE)
    return "" if is_harmless else f"{op.name} ({op.type}) keeps state in itself"


def _is_marked(op, name):
    """Returns whether an operator has the attribute `name`; its NodeDef would be a copy of all its constants."""
    try:
        return op.get_attr(name)
    except ValueError:
        return False
