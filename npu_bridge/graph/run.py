"""Describes one run of a session: its operators, its purpose, whether it trains, and which values can be read.

A tensor is read by fetching it along with the caller's fetches. The run must stay the same, so only tensors that it
computes anyway can be read. Their values must always exist, too: tensors inside a TF 1 loop, or on one side of a
condition, cannot be fetched.
"""

from __future__ import annotations

import functools
import math
import re
from typing import Any

import tensorflow as tf

from npu_bridge.base import kept_in_graph
from npu_bridge.base.search import search
from npu_bridge.base.tf_internals.graphs import operator_definition
from npu_bridge.graph.control_flow import Depth, group_by_depth
from npu_bridge.graph.functions import nodes_in_functions
from npu_bridge.graph.operators import computed_ops, list_elements, needed_ops, producers
from npu_bridge.graph.variables import (
    VARIABLE_TYPES,
    changes_variable,
    global_step_of,
    trained_variables,
    variable_behind,
)

TRANSFER_TYPES = re.compile(
    r"Horovod(Grouped)?(Allreduce|Allgather|Alltoall|Broadcast|Reducescatter)|Collective(Reduce|Gather|AllTo|Bcast)"
)
# Names of all-reduces of gradients: those of this package, and of Horovod's optimizers. Collectives in the forward
# pass, such as those of batch normalization over ranks, have other names.
_GRADIENT = re.compile(r"_fragment_\d+|_sparse_\d+|Distributed\w*_Allreduce")
_INCREMENTS = ("AssignAdd", "AssignAddVariableOp")
_CASTS_AND_COPIES = ("Cast", "DeepCopy", "Identity")
# Our choice: a smaller constant can be a weight of the loss. A scale is read, cast and perhaps clipped.
_LEAST_CONSTANT_SCALE = 16
_MOST_OPS_OF_SCALE = 12
# Marked as stateful, but they only read variables, check and print values, or call functions, which are searched.
_CHANGING_NOTHING = re.compile(
    r"(ReadVariableOp|ResourceGather(Nd)?|Var(HandleOp|IsInitializedOp|iable(V2)?)|Assert|Print(V2)?"
    r"|Case|If|StatefulPartitionedCall|While)$"
)

_RUN = "_npu_bridge_run"  # attribute of a context of a run
_RECORD = ("npu_bridge", "runs")


class SessionRun:
    """A description of the runs of a graph with the same fetches and feeds; attributes are computed at their first use.

    Attributes:
      requested_elements: the tensors and operators that are fetched or run.
      fed, fed_names: the tensors that are fed, and their names.
    """

    def __init__(self, graph: tf.Graph, requested_elements: list, fed: list):
        self._graph = graph
        self.requested_elements, self.fed = requested_elements, fed
        self.fed_names = frozenset(tensor.name for tensor in fed)

    @property
    def name(self) -> str:
        """Name of the first tensor or operator that is fetched or run."""
        first = self.requested_elements[0] if self.requested_elements else None
        return "nothing" if first is None else (first if isinstance(first, tf.Operation) else first.op).name

    @functools.cached_property
    def ops(self) -> tuple[tf.Operation, ...]:
        """The computed operators, each after its inputs."""
        return tuple(computed_ops(self.requested_elements, self.fed_names))

    @functools.cached_property
    def op_set(self) -> frozenset[tf.Operation]:
        """The computed operators, to look one up."""
        return frozenset(self.ops)

    @functools.cached_property
    def purpose(self) -> frozenset[str]:
        """The names of the operators that change variables, or of the fetches if there are none.

        These names identify the kind of a run: a training step stays the same kind when hooks fetch more now and then.
        """
        writers = frozenset(op.name for op in self.ops if changes_variable(op.type))
        return writers or frozenset(element.name for element in self.requested_elements)

    @functools.cached_property
    def values(self) -> frozenset[str]:
        """Names of the tensors that can be read, including those that are fed."""
        surely_run = group_by_depth(self.ops, self.fed_names).get(Depth(), [])
        produced = [tensor for op in surely_run for tensor in op.outputs]
        return frozenset(tensor.name for tensor in [*produced, *self.fed] if _is_readable(self._graph, tensor))

    def can_add(self, tensor: tf.Tensor, may_change_state: bool = False) -> bool:
        """Returns whether this rank can fetch `tensor` along alone: without an exchange of values or another feed.

        Operators that the run does not compute anyway may read variables. Only with `may_change_state`, they may take
        a batch or a random number, or change other state.
        """
        starts = [op for op in producers([tensor], self.fed_names) if op not in self.op_set]
        added = search(starts, lambda op: [o for o in needed_ops(op, self.fed_names) if o not in self.op_set])
        kinds = {node.op for op in added for node in [op.node_def, *nodes_in_functions(self._graph, [op.node_def])]}
        needs_others = any(kind == "Placeholder" or TRANSFER_TYPES.match(kind) for kind in kinds)
        return not needs_others and (may_change_state or not any(map(_changes_state, kinds)))

    @functools.cached_property
    def trained_variable_names(self) -> frozenset[str]:
        """Names of the trainable variables that are changed by values computed from them.

        Runs that train the same variables count as the same training, even when hooks fetch more now and then.
        """
        return trained_variables(self._graph, self.ops)

    @functools.cached_property
    def trains(self) -> bool:
        """Whether the run is a training step: its operators count steps, or use gradients.

        An optimizer made of plain assignments is recognised by gradients recorded with `record_gradients`.
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

    @functools.cached_property
    def is_step(self) -> bool:
        """Whether the run trains; in a graph in which no operators are known to train, each run counts as a step."""
        return self.trains or not SessionRun(self._graph, self._graph.get_operations(), []).trains

    def _assigns_gradients(self) -> bool:
        """Returns whether the run assigns to a trainable variable a value that is computed from a gradient."""
        gradients = _record_of_graph(self._graph).gradients
        if not gradients or not self.trained_variable_names:
            return False
        assigning = [
            op
            for op in self.ops
            if changes_variable(op.type) and variable_behind(op.inputs[0]) in self.trained_variable_names
        ]
        return any(op in gradients for op in search(assigning, lambda op: producers(op.inputs)))

    @functools.cached_property
    def loss(self) -> tf.Tensor | None:
        """The unscaled loss whose gradients the run computes; with several, the last one recorded; None without one."""
        computed = set(self.ops)
        losses = [loss for loss, gradients in _record_of_graph(self._graph).losses if gradients & computed]
        return _without_loss_scale(losses[-1]) if losses else None


def run_of(graph: tf.Graph, fetches: Any, feeds: Any = None) -> SessionRun:
    """Returns the description of a run: the same object for the same arguments, as long as the graph does not grow.

    Args:
      graph: the session's graph.
      fetches: as in `session.run`.
      feeds: a feed dictionary, or its keys.
    """
    asked = list_elements(graph, fetches)
    fed = [tensor for tensor in list_elements(graph, list(feeds or ())) if isinstance(tensor, tf.Tensor)]
    record = _record_of_graph(graph)
    version, runs = record.runs
    if version != graph.version:
        runs = {}
        record.runs = graph.version, runs
    key = (frozenset(tensor.name for tensor in fed), *(element.name for element in asked))
    if key not in runs:
        runs[key] = SessionRun(graph, asked, fed)
    return runs[key]


def run_of_context(run_context: tf.estimator.SessionRunContext) -> SessionRun:
    """Returns the description of a run, without the fetches of hooks; all hooks of the run share one look-up."""
    if not hasattr(run_context, _RUN):
        asked = run_context.original_args
        setattr(run_context, _RUN, run_of(run_context.session.graph, asked.fetches, asked.feed_dict))
    return getattr(run_context, _RUN)


def share_run(run_context: tf.estimator.SessionRunContext, other: tf.estimator.SessionRunContext) -> None:
    """Lets another context of the same run share its look-up."""
    setattr(other, _RUN, run_of_context(run_context))


def run_of_call(graph: tf.Graph, callable_options: Any) -> SessionRun:
    """Returns the `SessionRun` of a call of `session.make_callable`, described by CallableOptions."""
    pairs = callable_options.tensor_connection
    asked = [*callable_options.fetch, *callable_options.target, *(pair.from_tensor for pair in pairs)]
    return run_of(graph, asked, [*callable_options.feed, *(pair.to_tensor for pair in pairs)])


def record_gradients(ys: Any, gradients: Any) -> None:
    """Records the gradients of scalars for `SessionRun.loss`. Called by `call_after_gradients`."""
    made = frozenset(part.op for part in tf.nest.flatten(gradients, expand_composites=True) if part is not None)
    for tensor in tf.nest.flatten(ys):
        if isinstance(tensor, tf.Tensor):
            _record_of_graph(tensor.graph).gradients |= made
            if tensor.shape.rank == 0:
                _record_of_graph(tensor.graph).losses.append((tensor, made))


def sends_gradients(name: str, kind: str) -> bool:
    """Returns whether an operator of this name and type sends gradients between ranks."""
    return bool(TRANSFER_TYPES.match(kind) and _GRADIENT.search(name))


class _GraphRecord:
    """The known runs, losses and gradients of one graph."""

    def __init__(self):
        self.runs: tuple[int | None, dict[tuple, SessionRun]] = (None, {})  # a version and its runs, replaced at once
        self.losses: list[tuple[tf.Tensor, frozenset[tf.Operation]]] = []
        self.gradients: set[tf.Operation] = set()


def _record_of_graph(graph: Any) -> _GraphRecord:
    return kept_in_graph.find_or_make(graph, _RECORD, _GraphRecord)


def _changes_state(kind):
    definition = operator_definition(kind)
    return definition is not None and definition.is_stateful and not _CHANGING_NOTHING.match(kind)


def _without_loss_scale(loss: tf.Tensor) -> tf.Tensor:
    """Returns a loss without its loss scale: a power of two, or a factor from a variable with "scale" in its name."""
    scaled = _skip_casts(loss)
    factors = tuple(scaled.op.inputs) if scaled.op.type == "Mul" else ()
    for model, factor in (factors, factors[::-1]) if factors else ():
        if model.shape.rank == 0 and _is_loss_scale(factor):
            return _without_loss_scale(model)
    return loss


def _skip_casts(tensor: tf.Tensor) -> tf.Tensor:
    while tensor.op.type in _CASTS_AND_COPIES:
        tensor = tensor.op.inputs[0]
    return tensor


def _is_loss_scale(factor: tf.Tensor) -> bool:
    value = tf.get_static_value(_skip_casts(factor))
    if value is not None:
        return value.size == 1 and value >= _LEAST_CONSTANT_SCALE and math.frexp(value)[0] == 0.5
    behind = list(search([factor.op], lambda op: producers(op.inputs)))
    variables = [op.name for op in behind if op.type in VARIABLE_TYPES]
    return len(behind) < _MOST_OPS_OF_SCALE and bool(variables) and all("scale" in name for name in variables)


def _is_readable(graph, tensor) -> bool:
    dtype = tensor.dtype
    is_number = dtype.is_floating or dtype.is_integer or dtype.is_complex or dtype.is_bool
    is_reference = dtype.base_dtype != dtype
    return is_number and not is_reference and dtype.name not in ("int4", "uint4") and graph.is_fetchable(tensor)
