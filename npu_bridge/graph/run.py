"""What one run of a session computes: which operators, what it is for, whether it trains, what can be looked at.

A tensor is looked at by fetching it along with what the caller fetches. To leave the run as it is, only tensors
it computes anyway are fetched, and of those only the ones whose value is sure to exist: what runs inside a TF 1
loop, or on one side of a condition, cannot be fetched.
"""

from __future__ import annotations

import functools
import math
import re
from typing import Any

import tensorflow as tf

from npu_bridge.base.search import search
from npu_bridge.graph.control_flow import Depth, by_depth
from npu_bridge.graph.operators import computed_ops, list_elements, producers
from npu_bridge.graph.variables import (
    VARIABLE_TYPES,
    changes_variable,
    global_step_of,
    trained_variables,
    variable_behind,
)

TRANSFER_TYPES = re.compile(r"Horovod(Grouped)?(Allreduce|Allgather|Alltoall|Broadcast|Reducescatter)")
# Names of gradients on their way: those of this package, and of Horovod's optimizers. A transfer in the forward pass,
# as batch normalization over ranks has one, is none of them.
_GRADIENT = re.compile(r"_fragment_\d+|_sparse_\d+|Distributed\w*_Allreduce")
_INCREMENTS = ("AssignAdd", "AssignAddVariableOp")
_PASSING = ("Cast", "DeepCopy", "Identity")
# Ours: a smaller constant may be a weight of the loss; a scale is read, cast and perhaps kept in bounds.
_LEAST_CONSTANT_SCALE = 16
_MOST_OPS_OF_SCALE = 12


class Run:
    """One kind of run of a graph; each attribute is found out when it is first asked for.

    Attributes:
      asked: the tensors and operators that are fetched or run.
      fed: the tensors whose value is given, and `fed_names` their names.
    """

    def __init__(self, graph: tf.Graph, asked: list, fed: list):
        self._graph = graph
        self.asked, self.fed = asked, fed
        self.fed_names = frozenset(tensor.name for tensor in fed)

    @property
    def name(self) -> str:
        """Name of the first operator it was asked for."""
        first = self.asked[0] if self.asked else None
        return "nothing" if first is None else (first if isinstance(first, tf.Operation) else first.op).name

    @functools.cached_property
    def ops(self) -> tuple[tf.Operation, ...]:
        """What is computed, every operator after those it needs."""
        return tuple(computed_ops(self.asked, self.fed_names))

    @functools.cached_property
    def purpose(self) -> frozenset[str]:
        """What makes runs count as the same: the operators that change variables, or, where none does, what is fetched.

        Hooks that fetch more now and then do not make a training step another kind of run.
        """
        writers = frozenset(op.name for op in self.ops if changes_variable(op.type))
        return writers or frozenset(element.name for element in self.asked)

    @functools.cached_property
    def values(self) -> frozenset[str]:
        """Names of the tensors that can be looked at, given ones included."""
        surely_run = by_depth(self.ops, self.fed_names).get(Depth(), [])
        produced = [tensor for op in surely_run for tensor in op.outputs]
        return frozenset(tensor.name for tensor in [*produced, *self.fed] if _has_plain_value(self._graph, tensor))

    @functools.cached_property
    def trained(self) -> frozenset[str]:
        """Names of the trainable variables that are changed by what is computed from them.

        Runs that train the same variables are the same training, whatever else hooks fetch now and then.
        """
        return trained_variables(self._graph, self.ops)

    @functools.cached_property
    def trains(self) -> bool:
        """Whether it is a training step, as far as its operators tell: it counts steps, or has gradients at work.

        An optimizer that is written out in assignments is told by gradients that were noted (`note_gradients`).
        """
        if any(sends_gradients(op.name, op.type) for op in self.ops):
            return True
        global_step = global_step_of(self._graph)
        counted = (variable_behind(op.inputs[0]) for op in self.ops if op.type in _INCREMENTS)
        return (
            (global_step is not None and global_step.op.name in counted)
            or bool(trained_variables(self._graph, self.ops, assignments_count=False))
            or self._assigns_gradients()
        )

    def _assigns_gradients(self) -> bool:
        """Whether trainable variables are assigned what is computed from a gradient."""
        gradients = _kept_with(self._graph).gradients
        if not gradients or not self.trained:
            return False
        assigning = [
            op for op in self.ops if changes_variable(op.type) and variable_behind(op.inputs[0]) in self.trained
        ]
        return any(op in gradients for op in search(assigning, lambda op: producers(op.inputs)))

    @functools.cached_property
    def loss(self) -> tf.Tensor | None:
        """The last scalar given to `note_gradients` whose gradients it computes, without a scale; None without one."""
        computed = set(self.ops)
        losses = [loss for loss, gradients in _kept_with(self._graph).losses if gradients & computed]
        return _without_scale(losses[-1]) if losses else None


def run_of(graph: tf.Graph, fetches: Any, feeds: Any = None) -> Run:
    """What a run computes: the same object for the same question, as long as the graph does not grow.

    Args:
      graph: the session's graph.
      fetches: as given to `session.run`.
      feeds: what is fed: a feed dictionary, or its keys.
    """
    asked = list_elements(graph, fetches)
    fed = [tensor for tensor in list_elements(graph, list(feeds or ())) if isinstance(tensor, tf.Tensor)]
    kept = _kept_with(graph)
    if kept.version != graph.version:
        kept.version, kept.runs = graph.version, {}
    key = (frozenset(tensor.name for tensor in fed), *(element.name for element in asked))
    return kept.runs.setdefault(key, Run(graph, asked, fed))


def run_of_call(graph: tf.Graph, callable_options: Any) -> Run:
    """As `run_of`, of each call of a function that a session makes of a CallableOptions."""
    pairs = callable_options.tensor_connection
    asked = [*callable_options.fetch, *callable_options.target, *(pair.from_tensor for pair in pairs)]
    return run_of(graph, asked, [*callable_options.feed, *(pair.to_tensor for pair in pairs)])


def note_gradients(ys: Any, gradients: Any) -> None:
    """Remembers scalars that gradients are taken of, for `Run.loss`; made for `watch_gradients`."""
    made = frozenset(part.op for part in tf.nest.flatten(gradients, expand_composites=True) if part is not None)
    for tensor in tf.nest.flatten(ys):
        if isinstance(tensor, tf.Tensor):
            _kept_with(tensor.graph).gradients |= made
            if tensor.shape.rank == 0:
                _kept_with(tensor.graph).losses.append((tensor, made))


def sends_gradients(name: str, kind: str) -> bool:
    """Whether an operator of this name and type takes gradients from rank to rank, as its name tells."""
    return bool(TRANSFER_TYPES.match(kind) and _GRADIENT.search(name))


class _Kept:
    """What is known of one graph."""

    def __init__(self):
        self.version: int | None = None
        self.runs: dict[tuple, Run] = {}
        self.losses: list[tuple[tf.Tensor, frozenset[tf.Operation]]] = []
        self.gradients: set[tf.Operation] = set()


def _kept_with(graph: Any) -> _Kept:
    if not hasattr(graph, "_npu_bridge_runs"):
        graph._npu_bridge_runs = _Kept()  # part of the graph, as its operators hold it: it ends with the graph
    return graph._npu_bridge_runs


def _without_scale(loss: tf.Tensor) -> tf.Tensor:
    """What a loss scale was multiplied with: a factor that is a power of two, or kept in a variable called a scale."""
    scaled = _passed_on(loss)
    factors = tuple(scaled.op.inputs) if scaled.op.type == "Mul" else ()
    for model, factor in (factors, factors[::-1]) if factors else ():
        if model.shape.rank == 0 and _is_loss_scale(factor):
            return _without_scale(model)
    return loss


def _passed_on(tensor: tf.Tensor) -> tf.Tensor:
    while tensor.op.type in _PASSING:
        tensor = tensor.op.inputs[0]
    return tensor


def _is_loss_scale(factor: tf.Tensor) -> bool:
    value = tf.get_static_value(_passed_on(factor))
    if value is not None:
        return value.size == 1 and value >= _LEAST_CONSTANT_SCALE and math.frexp(value)[0] == 0.5
    behind = list(search([factor.op], lambda op: producers(op.inputs)))
    variables = [op.name for op in behind if op.type in VARIABLE_TYPES]
    return len(behind) < _MOST_OPS_OF_SCALE and bool(variables) and all("scale" in name for name in variables)


def _has_plain_value(graph, tensor) -> bool:
    dtype = tensor.dtype
    is_number = dtype.is_floating or dtype.is_integer or dtype.is_complex or dtype.is_bool
    is_reference = dtype.base_dtype != dtype
    return is_number and not is_reference and dtype.name not in ("int4", "uint4") and graph.is_fetchable(tensor)
