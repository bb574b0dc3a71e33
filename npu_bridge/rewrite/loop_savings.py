"""What the copy of a step can do without: switches that decide nothing, and what is read twice.

In a loop of small steps every operator counts, as much time goes into handing things over as into computing. An
operator that has nothing to do because of one of its inputs needs no switch in front of the others. What a variable
holds before anyone in the step changes it has to be read only once. And where nothing is to be broadcast, the older
operator that cannot do so chooses among two values in a third of the time.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence

import tensorflow as tf

from npu_bridge.rewrite.conditions import Condition, conditions_of_tensor, find_conditions
from npu_bridge.rewrite.loop_nodes import NotLoopableError
from npu_bridge.tf_internals.graphs import is_reference

_READS = "ReadVariableOp"
_ONLY_LOOK = (_READS, "ResourceGather", "ResourceGatherNd", "VarIsInitializedOp", "VariableShape")
_HAND_ON = ("Identity", "Switch")
_JOIN = ("Merge", "RefMerge")


class LoopSavings:
    """How the copies of a step's operators may differ from the originals and still compute the same.

    What is computed from numbers alone reads what it read: TensorFlow adds up in the order of names, and the sum of the
    same numbers in another order is another one. So only operators that take a variable get something else to read.

    Args:
      inside: the operators of a step, each after those it waits for; see `ops_inside`.
      fed: names of tensors whose value is given with the run.
    Attributes:
      inputs: by name of an operator, what its copy reads, in the order of its inputs; only where that differs.
      types: by name of an operator, the type of its copy; only where that differs.
      same_values: by name of a tensor, another one that always has the same value.
    """

    def __init__(self, inside: Sequence[tf.Operation], fed: Collection[str]):
        self._fed = fed
        self._inside = {op.name for op in inside}
        self.types = {op.name: "Select" for op in inside if op.type == "SelectV2" and _have_one_shape(op.inputs)}
        self.inputs: dict[str, list[tf.Tensor]] = {}
        self.same_values: dict[str, tf.Tensor] = {}
        try:
            self._conditions: Mapping[str, frozenset[Condition]] = find_conditions(inside, fed)
        except NotLoopableError:
            return  # control flow that is not understood stays as it is
        self._find_needless_switches(inside)
        self._find_same_values(inside)

    def _find_needless_switches(self, inside):
        for op in inside:
            if _takes_a_resource(op) and op.type not in _JOIN:
                reads = self._without_switches(op)
                if any(one is not other for one, other in zip(reads, op.inputs)):
                    self.inputs[op.name] = reads

    def _without_switches(self, op):
        """What an operator may read so that it still has nothing to do when one of its conditions does not hold."""
        switched = [self._is_switched(tensor) for tensor in op.inputs]
        known = [self._conditions.get(other.name, frozenset()) for other in op.control_inputs]
        known += [self._conditions_of(tensor) for tensor, is_one in zip(op.inputs, switched) if not is_one]
        kept = frozenset().union(*known)
        reads = []
        for tensor, is_one in zip(op.inputs, switched):
            if is_one and self._conditions_of(tensor) <= kept:
                tensor = tensor.op.inputs[0]
            kept |= self._conditions_of(tensor)
            reads.append(tensor)
        return reads

    def _find_same_values(self, inside):
        """Readings of a variable that are all done before anyone in the step can change it."""
        readings: dict[tuple, list[tf.Operation]] = {}
        writers: dict[tuple, list[tf.Operation]] = {}
        for op in inside:
            for variable in self._variables_used_by(op):
                if op.type == _READS and op.outputs[0].name not in self._fed:
                    waits_for = frozenset(other.name for other in op.control_inputs)
                    alike = (variable, op.get_attr("dtype"), self._conditions[op.name], waits_for)
                    readings.setdefault(alike, []).append(op)
                elif op.type not in _ONLY_LOOK:
                    writers.setdefault(variable, []).append(op)
        before = self._readings_before(inside, [op for group in readings.values() if len(group) > 1 for op in group])
        for (variable, *_), (first, *others) in readings.items():
            for op in others:
                users = [user for user in op.outputs[0].consumers() if user.name in self._inside]
                if all(map(_takes_a_resource, users)) and all(
                    {first.name, op.name} <= before[writer.name] for writer in writers.get(variable, ())
                ):
                    self.same_values[op.outputs[0].name] = first.outputs[0]

    def _variables_used_by(self, op) -> Iterator[tuple]:
        """Handles that an operator takes and does not merely hand on."""
        if op.type in _HAND_ON:
            return
        for tensor in op.inputs:
            if tensor.dtype == tf.resource:
                while tensor.op.type in _HAND_ON and tensor.name not in self._fed:
                    tensor = tensor.op.inputs[0]
                handle = tensor.op
                if handle.type == "VarHandleOp":
                    yield handle.get_attr("container"), handle.get_attr("shared_name") or handle.name.encode()

    def _readings_before(self, inside, readings):
        """By name of an operator, which of some readings it is or waits for."""
        wanted = {op.name for op in readings}
        before: dict[str, frozenset[str]] = {}
        for op in inside:
            waited_for = [tensor.op for tensor in op.inputs if tensor.name not in self._fed] + list(op.control_inputs)
            own = {op.name} & wanted
            before[op.name] = frozenset(own).union(*(before.get(other.name, ()) for other in waited_for))
        return before

    def _conditions_of(self, tensor):
        return conditions_of_tensor(tensor, self._conditions, self._fed)

    def _is_switched(self, tensor):
        if tensor.op.type != "Switch" or tensor.op.name not in self._inside or tensor.name in self._fed:
            return False
        # A reference variable has its value of the moment when it is switched.
        return not is_reference(tensor.op.inputs[0].dtype)


def _takes_a_resource(op):
    return any(tensor.dtype == tf.resource for tensor in op.inputs)


def _have_one_shape(tensors):
    first, *others = (tensor.shape for tensor in tensors)
    return first.is_fully_defined() and all(other.is_fully_defined() and other == first for other in others)
