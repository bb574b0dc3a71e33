"""Finds the transfers of a graph: operators that all-reduce gradients."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable

from npu_bridge.base.own_tensorflow import tf
from npu_bridge.base.tf_internals.graphs import control_flow_context
from npu_bridge.collective.engines.transfer_tensors import start_of_exchange
from npu_bridge.tailing import branches
from npu_bridge.tailing.branches import CHANGES_OF_DTYPE, JOINS, SUMS


@dataclasses.dataclass(frozen=True)
class Transfer:
    """A place in a graph where floating-point tensors are averaged, summed or concatenated over the ranks.

    Attributes:
      op: the op that outputs the results: a Horovod op, the end of a `cond` branch with a Horovod op (as
        `hvd.DistributedOptimizer` builds it), or the last of the ops that convert numbers before and after they are
        sent.
      entry: the op whose inputs are sent; usually `op` itself.
      routes: for each tensor, its position among the outputs of `op` and among the inputs of `entry`.
      factor: the factor by which the sum over the ranks is multiplied, without the division for a mean.
      wire_dtype: the dtype in which the tensors are sent.
      adds_up: whether the sum is computed in `wire_dtype`, so that it can overflow. Otherwise no result is larger than
        the largest number sent.
    """

    op: tf.Operation
    entry: tf.Operation
    routes: tuple[tuple[int, int], ...]
    factor: float
    wire_dtype: tf.DType
    adds_up: bool = True

    @property
    def sent(self) -> list[tf.Tensor]:
        """The local tensors of this rank, in the order of `arrived`."""
        return [self.entry.inputs[position] for _, position in self.routes]

    @property
    def arrived(self) -> list[tf.Tensor]:
        """The results, in the order of `sent`."""
        return [self.op.outputs[position] for position, _ in self.routes]

    @property
    def size_bytes(self) -> int:
        """Bytes sent, without tensors whose static shape is unknown."""
        return sum((tensor.shape.num_elements() or 0) for tensor in self.sent) * self.wire_dtype.size


def find_transfers(ops: Iterable[tf.Operation]) -> list[Transfer]:
    """Returns the transfers of floating-point tensors among ops of a TF 1 graph, in order."""
    found = (_make_transfer(op) for op in ops)
    return [transfer for transfer in found if transfer is not None]


def find_transfer_in_functions(ops: Iterable[tf.Operation], transfers: Iterable[Transfer]) -> str:
    """Returns the name of a transfer hidden in a function that one of `ops` calls; "" if there is none."""
    known = {transfer.op.name for transfer in transfers}
    inside = (name for op in ops if op.name not in known for name in branches.transfers_inside(op))
    return next(inside, "")


def is_integer_all_reduce(op: tf.Operation) -> bool:
    """Returns whether an op sums one integer over the ranks. Joint decisions of the ranks are made in this way."""
    return op.type in SUMS and len(op.outputs) == 1 and op.outputs[0].dtype.is_integer and op.outputs[0].shape == []


def _make_transfer(op):
    sender = start_of_exchange(op)
    if sender is not None:
        return Transfer(op, sender, ((0, 0),), 1.0, op.outputs[0].dtype, adds_up=False)
    if op.type in (*SUMS, *JOINS) and op.outputs and op.outputs[0].dtype.is_floating:
        adds_up = op.type in SUMS
        factor = abs(op.get_attr("prescale_factor") * op.get_attr("postscale_factor")) if adds_up else 1.0
        routes = tuple((position, position) for position in range(len(op.outputs)))
        return _extend_to_branch_ends(Transfer(op, op, routes, factor, op.outputs[0].dtype, adds_up))
    exchange = branches.find_exchange(op) if op.type in branches.TYPES else None
    return None if exchange is None else Transfer(op, op, *exchange)


def _extend_to_branch_ends(transfer):
    """Extends a transfer in a `cond` branch: from the switch before its input to the merge at the end of the branch."""
    if control_flow_context(transfer.op) is None or len(transfer.routes) != 1:
        return transfer
    end, start = transfer.op, transfer.op.inputs[0].op
    while end.type != "Merge":
        users = end.outputs[0].consumers()
        if len(users) != 1 or not _only_passes_on_or_divides(users[0], end):
            return transfer
        end = users[0]
    while start.type in CHANGES_OF_DTYPE:
        start = start.inputs[0].op
    if start.type != "Switch" or not _is_unchanged_without_transfer(end, start):
        return transfer
    return dataclasses.replace(transfer, op=end, entry=start, routes=((0, 0),))


def _only_passes_on_or_divides(consumer, op):
    """Returns whether `consumer` only divides the output of `op` by at least 1, casts it, or merges branches."""
    if consumer.type == "RealDiv" and consumer.inputs[0].op is op:
        divisor = tf.get_static_value(consumer.inputs[1])
        return divisor is not None and divisor.ndim == 0 and abs(divisor) >= 1
    return consumer.type in ("Merge", *CHANGES_OF_DTYPE)


def _is_unchanged_without_transfer(merge_op, exchange_start):
    """Returns whether a condition with a transfer in one branch passes the tensor on unchanged in the other branch."""
    others = [tensor.op for tensor in merge_op.inputs if tensor.op.type == "Switch"]
    return len(others) == 1 and others[0].inputs[0].name == exchange_start.inputs[0].name
