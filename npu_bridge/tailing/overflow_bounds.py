"""Bounds reduced gradients by local gradients, to know before the all-reduce which overflow checks will pass.

The norm of a reduced gradient is at most the number of ranks times the largest norm of a local gradient. So if local
gradients are far enough from overflow on every rank, the reduced gradients have no Inf or NaN, and the result of the
overflow check is known early. Bounds are Euclidean norms, which cost one pass over a gradient and also bound its
elements. If a bound is exceeded, the overflow check itself must decide.
"""

from __future__ import annotations

import math

from npu_bridge.base.own_tensorflow import tf
from npu_bridge.base.search import search
from npu_bridge.base.tf_internals.graphs import control_flow_context
from npu_bridge.tailing.transfers import is_integer_all_reduce

_SAME_VALUES = ("Identity", "Reshape", "ExpandDims", "Squeeze", "StopGradient")
_SAME_NORM = ("Abs", "Neg", "Cast")
# Ops that return a part of an input's values, with that input's position.
_PARTS = {"StridedSlice": 0, "Slice": 0, "SplitV": 0, "Split": 1}
# For sums of unknown length: the square root of a number of terms that no memory can hold (our choice).
_ROOT_OF_MOST_TERMS = 2.0**20
_ALL_OF = (*_SAME_VALUES, "All", "LogicalAnd", "Pack", "ConcatV2")
_ANY_OF = (*_SAME_VALUES, "Any", "LogicalOr", "Pack", "ConcatV2")


class UnsupportedCheckError(Exception):
    """An overflow check has ops whose result cannot be known before the all-reduce; the message names the op."""


class OverflowBounds:
    """Builds, op by op, bounds for tensors that depend on all-reduces, and early results of checks of these tensors.

    Args:
      transfers: dict from the name of each all-reduce op to its transfer.
      dependent: names of the ops that depend on an all-reduce.
      ranks: number of ranks.
    """

    def __init__(self, transfers: dict, dependent: set, ranks: int):
        self._transfers = transfers
        self._dependent = dependent
        self._ranks = ranks
        self._known: dict = {}
        self._arriving: dict = {}

    def is_surely_true(self, tensor: tf.Tensor) -> tf.Tensor:
        """Returns a boolean scalar for this rank. If the scalars of all ranks are True, all of `tensor` is True.

        Raises:
          UnsupportedCheckError: the tensor is made of unsupported ops.
        """
        return self._build_once("true", tensor, self._build_is_true)

    def is_surely_false(self, tensor: tf.Tensor) -> tf.Tensor:
        """Returns a boolean scalar for this rank. If the scalars of all ranks are True, all of `tensor` is False.

        Raises:
          UnsupportedCheckError: the tensor is made of unsupported ops.
        """
        return self._build_once("false", tensor, self._build_is_false)

    def is_transfer(self, op: tf.Operation) -> bool:
        """Returns whether an op all-reduces gradients."""
        return op.name in self._transfers

    def is_made_of_transfers(self, tensor: tf.Tensor) -> bool:
        """Returns whether a tensor's value depends on all-reduces; a condition around the tensor does not count."""

        def sources(op):
            data = op.inputs[:1] if op.type in ("Switch", "RefSwitch") else op.inputs
            return [source.op for source in data if self._depends_on_transfer(source.op)]

        return any(op.name in self._transfers for op in search([tensor.op], sources))

    def ops_from_transfers_to(self, op: tf.Operation, index) -> list:
        """Returns the ops from the all-reduces to `op`, both included, in graph order."""
        before = index.ancestors([op]) & self._dependent
        return [member for member in index.ops if member.name in before]

    def norm_bound(self, tensor: tf.Tensor) -> tf.Tensor:
        """Returns a float32 scalar of this rank; its maximum over all ranks bounds the Euclidean norm of `tensor`.

        The scalar is Inf or NaN if there is no bound.
        """
        return self._build_once("bound", tensor, self._build_bound)

    def _build_once(self, kind, tensor, build):
        while tensor.op.type in ("Switch", "RefSwitch"):  # returns its input, or nothing
            tensor = tensor.op.inputs[0]
        key = kind, tensor.name
        if key not in self._known:
            self._known[key] = build(tensor)
        return self._known[key]

    def _build_is_true(self, tensor):
        op = tensor.op
        if not self._depends_on_transfer(op):
            return tf.reduce_all(_tensor_outside_conditions(tensor))
        if op.type == "IsFinite":
            return tf.math.is_finite(self.norm_bound(op.inputs[0]))
        if op.type == "LogicalNot":
            return self.is_surely_false(op.inputs[0])
        if op.type in _ALL_OF:
            return self._all_boolean_inputs(self.is_surely_true, op)
        votes = _votes_compared_with_zero(op)
        if votes is not None:
            return self._is_vote_zero(votes)
        raise UnsupportedCheckError(f"{op.name} ({op.type})")

    def _build_is_false(self, tensor):
        op = tensor.op
        if not self._depends_on_transfer(op):
            return tf.logical_not(tf.reduce_any(_tensor_outside_conditions(tensor)))
        if op.type in ("IsNan", "IsInf"):
            return tf.math.is_finite(self.norm_bound(op.inputs[0]))
        if op.type == "LogicalNot":
            return self.is_surely_true(op.inputs[0])
        if op.type in _ANY_OF:
            return self._all_boolean_inputs(self.is_surely_false, op)
        raise UnsupportedCheckError(f"{op.name} ({op.type})")

    def _all_boolean_inputs(self, is_certain, op):
        """Returns whether `is_certain` holds for all boolean inputs of an op; other inputs are axes and shapes."""
        parts = [is_certain(tensor) for tensor in op.inputs if tensor.dtype == tf.bool]
        return tf.reduce_all(tf.stack(parts)) if len(parts) > 1 else parts[0]

    def _is_vote_zero(self, votes):
        """Returns whether this rank's vote is certainly 0.

        The ranks sum their votes, booleans cast to integers, and compare the sum with zero.
        """
        while votes.op.type in ("DeepCopy", *_SAME_VALUES):
            votes = votes.op.inputs[0]
        if votes.op.type != "Cast" or votes.op.inputs[0].dtype != tf.bool:
            raise UnsupportedCheckError(f"{votes.op.name} ({votes.op.type})")
        return self.is_surely_false(votes.op.inputs[0])

    def _build_bound(self, tensor):
        op = tensor.op
        if op.name in self._transfers:
            transfer = self._transfers[op.name]
            bound = self._bounds_of_transfers().get(tensor.name)
            if bound is None:
                raise UnsupportedCheckError(f"{op.name} ({op.type})")
            return (
                _inf_if_too_large(tensor.dtype, _inf_if_too_large(transfer.wire_dtype, bound))
                if transfer.adds_up
                else bound
            )
        if not self._depends_on_transfer(op):
            return _norm_bounds(tf.nn.l2_loss(_in_float32(_tensor_outside_conditions(tensor))))
        if op.type in _SAME_VALUES:
            return self.norm_bound(op.inputs[0])
        if op.type in _PARTS:
            return self.norm_bound(op.inputs[_PARTS[op.type]])
        return _inf_if_too_large(tensor.dtype, self._bound_of_result(op))

    def _bounds_of_transfers(self):
        """Returns the bounds of all reduced tensors by name; builds one op for each tensor, and a few shared ops."""
        if not self._arriving:
            squares, factors = {}, []
            for transfer in self._transfers.values():
                for arrived, sent in zip(transfer.arrived, transfer.sent):
                    squares[arrived.name] = tf.nn.l2_loss(_in_float32(sent))
                    factors.append(self._ranks * max(transfer.factor, 1.0))
            bounds = _norm_bounds(tf.stack(list(squares.values()))) * tf.constant(factors)
            self._arriving = dict(zip(squares, tf.unstack(bounds)))
        return self._arriving

    def _bound_of_result(self, op):
        if op.type in _SAME_NORM:
            return self.norm_bound(op.inputs[0])
        if op.type in ("L2Loss", "Square"):
            return tf.square(self.norm_bound(op.inputs[0]))
        if op.type == "Mul":
            return self._bound_of_product(*op.inputs)
        if op.type == "RealDiv" and not self._depends_on_transfer(op.inputs[1].op) and _has_no_broadcast_input(op):
            return self.norm_bound(op.inputs[0]) / _smallest_magnitude(_tensor_outside_conditions(op.inputs[1]))
        if op.type in ("AddN", "Add", "AddV2", "Sub") and _has_no_broadcast_input(op):
            return tf.reduce_sum([self.norm_bound(term) * _sqrt_of_copies(term, op.outputs[0]) for term in op.inputs])
        if op.type in ("Pack", "ConcatV2"):
            parts = op.inputs if op.type == "Pack" else op.inputs[:-1]  # the last one is the axis
            return tf.reduce_sum([self.norm_bound(part) for part in parts])
        if op.type in ("Sum", "UnsortedSegmentSum"):
            return self.norm_bound(op.inputs[0]) * _sqrt_of_element_count(op.inputs[0])
        raise UnsupportedCheckError(f"{op.name} ({op.type})")

    def _bound_of_product(self, first, second):
        bounds = self.norm_bound(first), self.norm_bound(second)
        if self._depends_on_transfer(first.op) and self._depends_on_transfer(second.op):
            # The largest bounds of the two factors can be those of different ranks.
            return tf.square(tf.maximum(*bounds))
        return bounds[0] * bounds[1]

    def _depends_on_transfer(self, op):
        return op.name in self._dependent


def _votes_compared_with_zero(op):
    """Returns this rank's term of an integer sum over the ranks if `op` compares the sum with zero, else None."""
    if op.type != "Equal":
        return None
    for one, other in ((0, 1), (1, 0)):
        if is_integer_all_reduce(op.inputs[one].op) and tf.get_static_value(op.inputs[other]) == 0:
            return op.inputs[one].op.inputs[0]
    return None


def _tensor_outside_conditions(tensor):
    """Returns a tensor that exists in every run: `tensor`, or its constant value if it is inside a condition.

    Raises:
      UnsupportedCheckError: the tensor is inside a condition and not constant.
    """
    if control_flow_context(tensor.op) is None:
        return tensor
    value = tf.get_static_value(tensor)
    if value is None:
        raise UnsupportedCheckError(f"{tensor.op.name} ({tensor.op.type})")
    return tf.constant(value)


def _norm_bounds(half_sums_of_squares):
    """Returns bounds of Euclidean norms: twice the norm, since long sums lose accuracy, plus 1e-15 for underflow."""
    return tf.sqrt(half_sums_of_squares) * (2.0 * math.sqrt(2.0)) + 1e-15


def _in_float32(tensor):
    return tensor if tensor.dtype == tf.float32 else tf.cast(tensor, tf.float32)


def _has_no_broadcast_input(op):
    """Returns whether no input of an op is broadcast, except scalars; broadcasting would increase a norm."""
    first, *others = (tensor.shape for tensor in op.inputs)
    return all(shape.rank == 0 or (shape.is_fully_defined() and shape == first) for shape in others)


def _sqrt_of_copies(term, result):
    """Returns √n if `term` is a scalar that is added to each of n elements of `result`, else 1."""
    is_copied = term.shape.rank == 0 and result.shape.rank != 0
    return _sqrt_of_element_count(result) if is_copied else 1.0


def _sqrt_of_element_count(tensor):
    """Returns √n for a tensor of n elements: their sum is at most √n times their norm."""
    terms = tensor.shape.num_elements()
    return _ROOT_OF_MOST_TERMS if terms is None else math.sqrt(max(terms, 1))


def _smallest_magnitude(tensor):
    return tf.reduce_min(tf.abs(tf.cast(tensor, tf.float32)))


def _inf_if_too_large(dtype, bound):
    """Returns the bound, or Inf if `dtype` cannot hold a number of that size."""
    if not dtype.is_floating or dtype.max >= tf.float32.max:
        return bound
    return tf.where(bound <= float(dtype.max), bound, float("inf"))
