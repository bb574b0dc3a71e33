"""Finding the transfers of a graph: ops through which gradients go from rank to rank."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable

import tensorflow as tf

_SUMS = ("HorovodAllreduce", "HorovodGroupedAllreduce")
_GATHER = "HorovodAllgather"
_BRANCHES = ("If", "StatelessIf")
_CHANGES_OF_DTYPE = ("Identity", "Cast")


@dataclasses.dataclass(frozen=True)
class Transfer:
    """A place where tensors go from rank to rank: averaged, added up or joined.

    Attributes:
      op: whose outputs arrive: a Horovod op, or the end of a branch that holds one, as `hvd.DistributedOptimizer`
        builds it.
      entry: whose inputs are sent; mostly the same op.
      first_input: position of the first tensor that travels among the inputs of `entry`; output i of `op` belongs to
        the input `first_input + i`.
      factor: what the sum over the ranks is multiplied by besides a mean's division.
      wire_dtype: the dtype in which they travel.
    """

    op: tf.Operation
    entry: tf.Operation
    first_input: int
    factor: float
    wire_dtype: tf.DType

    def sent(self, position: int = 0) -> tf.Tensor:
        """The tensor of this rank that becomes output `position`."""
        return self.entry.inputs[self.first_input + position]

    @property
    def _count(self):
        return len(self.op.outputs) if self.op is self.entry else 1

    @property
    def inputs(self) -> range:
        """Positions of what travels among the inputs of `entry`."""
        return range(self.first_input, self.first_input + self._count)

    @property
    def size_bytes(self) -> int:
        """Bytes of the tensors as far as static shapes tell."""
        elements = sum((self.entry.inputs[position].shape.num_elements() or 0) for position in self.inputs)
        return elements * self.wire_dtype.size


def find_transfers(ops: Iterable[tf.Operation]) -> list[Transfer]:
    """The transfers among ops of a TF 1 graph, in order; those of integers, flags among them, are left out."""
    found = (_transfer(op) for op in ops)
    return [transfer for transfer in found if transfer is not None and transfer.wire_dtype.is_floating]


def is_flag_transfer(op: tf.Operation) -> bool:
    """True for a sum of one integer over the ranks, as a joint decision is made of."""
    return op.type in _SUMS and len(op.outputs) == 1 and op.outputs[0].dtype.is_integer and op.outputs[0].shape == []


def _transfer(op):
    if op.type in _SUMS and op.outputs:
        factor = abs(op.get_attr("prescale_factor") * op.get_attr("postscale_factor"))
        return _out_of_its_branch(Transfer(op, op, 0, factor, op.outputs[0].dtype))
    if op.type == _GATHER:
        return _out_of_its_branch(Transfer(op, op, 0, 1.0, op.outputs[0].dtype))
    if op.type in _BRANCHES and len(op.inputs) == 2 and len(op.outputs) == 1:
        inside = _only_transfer_inside(op)
        if inside is not None:
            factor, wire_dtype = inside
            return Transfer(op, op, 1, factor, wire_dtype)
    return None


def _out_of_its_branch(transfer):
    """A transfer in a branch made of switches goes from the switch that lets its input in to the merge at its end."""
    if transfer.op._get_control_flow_context() is None or len(transfer.op.outputs) != 1:
        return transfer
    end, start = transfer.op, transfer.op.inputs[0].op
    while end.type != "Merge":
        users = end.outputs[0].consumers()
        if len(users) != 1 or users[0].type not in ("Merge", *_CHANGES_OF_DTYPE):
            return transfer
        end = users[0]
    while start.type in _CHANGES_OF_DTYPE:
        start = start.inputs[0].op
    return dataclasses.replace(transfer, op=end, entry=start) if start.type == "Switch" else transfer


def _only_transfer_inside(branch):
    """Factor and dtype of a branch that sends its input to the other ranks and gives the result back, or None.

    Between the input and the output there may be nothing but changes of dtype.
    """
    body = branch.graph._get_function(branch.get_attr("then_branch").name).cached_definition
    nodes = {node.name: node for node in body.node_def}
    found, reference = None, body.ret[body.signature.output_arg[0].name]
    while (node := nodes.get(reference.partition(":")[0])) is not None:
        if node.op == "HorovodAllreduce" and found is None:
            factor = abs(node.attr["prescale_factor"].f * node.attr["postscale_factor"].f)
            found = factor, tf.as_dtype(node.attr["T"].type)
        elif node.op not in _CHANGES_OF_DTYPE:
            return None
        reference = node.input[0]
    return found
