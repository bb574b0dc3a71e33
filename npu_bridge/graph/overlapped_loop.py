"""Copies a training step into a loop of its graph in which a step begins before the previous step is over.

An operator that reads a variable waits only until the previous step has written this variable. So a layer's forward
pass can run while gradients of other layers are still being all-reduced. The results are the same, bit for bit, because

- readers of a variable wait for all its writers in the previous step;
- writers of a variable wait for the whole previous step, and so for all readers of the variable there;
- an iterator, a table or a collective is used by one step after the other;
- at the end of the data, TensorFlow's error waits for the whole previous step.

Tokens, boolean scalars that are always True, carry these dependencies from iteration to iteration.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

import tensorflow as tf

from npu_bridge.base.search import search
from npu_bridge.base.tf_internals.graphs import is_reference
from npu_bridge.graph.control_flow import Guards, classic_control_flow, guards_of
from npu_bridge.graph.loop import (
    COLLECTIVE_TYPES,
    InGraphLoop,
    NotLoopableError,
    export_definition,
    name_of_outer_tensor,
    ops_to_copy,
)
from npu_bridge.graph.variables import VARIABLE_TYPES, changes_variable

tf1 = tf.compat.v1
_SCOPE = "overlapped_loop"
_FORWARDING = ("Identity", "RefIdentity", "RefSwitch", "Switch")
_NEXT = "IteratorGetNext"
_WHOLE = "^whole_step"


def put_in_overlapped_loop(
    graph: tf.Graph,
    step: Iterable[tf.Operation],
    fed_names: Collection[str] = (),
    control_inputs_of_copies: Mapping[tf.Operation, Collection[tf.Operation]] | None = None,
) -> InGraphLoop:
    """Builds a loop in which every iteration runs the operators in `step`, and begins as early as it can.

    Args:
      graph: a TF 1 graph that is not finalized.
      step: the operators that make up a training step; none is inside a condition.
      fed_names: names of the tensors fed in the run; every iteration gets the same values.
      control_inputs_of_copies: dict from an operator to the control inputs that its copy gets instead of the operator's
        control inputs.
    Raises:
      NotLoopableError: a copy of some operator would not be equivalent. The graph is unchanged.
    Graph: name scope `overlapped_loop`, with a copy of all that the step computes.
    Ranks: collective if the step is: all ranks run this loop, for the same number of steps.
    """
    step, fed_names = list(step), frozenset(fed_names)
    body = _LoopIteration(graph, step, fed_names, control_inputs_of_copies or {})
    with graph.as_default(), tf.control_dependencies(None), tf.device(None), tf.name_scope(""):
        with tf.name_scope(_SCOPE), classic_control_flow():
            count = tf1.placeholder(tf.int64, [], name="count")
            start = [tf.constant(0, tf.int64), *(tf.constant(True) for _ in range(1 + len(body.states)))]
            reached = tf1.while_loop(
                lambda number, *_: number < count, body.build_iteration, start, parallel_iterations=2
            )
            return InGraphLoop(tf.group(*reached), count, body.transfers)


@dataclasses.dataclass
class _StateBetweenSteps:
    """A variable, iterator, table or collective, which outlives a step, and the copied operators that use it.

    Attributes:
      source: the operator that gives access to the state; for a collective, the collective itself.
      is_variable: whether the state is a variable, so that reads and writes differ.
      entrances: the copied operators that read `source` itself, which is not copied, each with the input's position.
      readers, writers: the operators that use the state; all are writers if the state is not a variable.
    """

    source: tf.Operation
    is_variable: bool
    entrances: list[tuple[tf.Operation, int]] = dataclasses.field(default_factory=list)
    readers: list[tf.Operation] = dataclasses.field(default_factory=list)
    writers: list[tf.Operation] = dataclasses.field(default_factory=list)

    @property
    def is_reference(self) -> bool:
        return any(is_reference(tensor.dtype) for tensor in self.source.outputs) and self.is_variable


class _LoopIteration:
    """One iteration of the loop.

    Attributes:
      states: the variables, resources and collectives whose use the tokens order, in the order of the tokens.
      transfers: as in `InGraphLoop`, once the iteration is built.
    """

    def __init__(self, graph, step, fed, waits):
        copied = ops_to_copy(step, fed, with_collectives=True)
        self._step = step
        self._fed = fed
        self._guards = guards_of(copied, fed)
        if any(self._guards[op] for op in step):
            raise NotLoopableError({op: f"{op.name} is part of a condition" for op in step if self._guards[op]})
        # The batch is read outside of the copy, where the end of the data is visible.
        self._batches = [op for op in copied if op.type == _NEXT and self._always_runs(op)]
        inside = [op for op in copied if op not in self._batches]
        states = _find_states(copied)
        self.states = [state for state in states if state.writers and (state.readers or not state.is_variable)]
        self._definition, self._outer = export_definition(graph, inside, fed)
        self._nodes = dict(zip(inside, self._definition.node))
        self._add_dependencies(states, waits)
        deciders = {name for op in _writers(self.states) for name, _ in self._guards[op]}
        self._copied_names = {op.name for op in inside}
        self.transfers: dict[str, tf.Operation] = {}
        self._deciders = sorted(name for name in deciders if self._is_copied(name))

    def build_iteration(
        self, iteration_number: tf.Tensor, whole_step_token: tf.Tensor, *tokens: tf.Tensor
    ) -> list[tf.Tensor]:
        """Builds the iteration for `tf.while_loop`; takes and returns the loop's variables."""
        outer = {**self._outer, _WHOLE: whole_step_token}
        token_of = {state.source: token for state, token in zip(self.states, tokens)}
        for state in self.states:
            outer[f"^{_token_name(state)}"] = token_of[state.source]
            if state.is_reference:
                # A switch, as TensorFlow's graph optimiser moves readers in front of an identity that waits.
                (reference,) = state.source.outputs
                gate = tf.raw_ops.RefSwitch(data=reference, pred=token_of[state.source])
                outer[f"{_token_name(state)}:0"] = gate.output_true
        made: dict[Any, Any] = {}
        for op in self._batches:
            made[op], batch = _read_batch(op, token_of[op.inputs[0].op], whole_step_token)
            outer.update((name_of_outer_tensor(inside), given) for inside, given in zip(op.outputs, batch))
        # TensorFlow rejects inputs that the definition does not use.
        asked = {name for node in self._definition.node for name in node.input}
        outer = {name: tensor for name, tensor in outer.items() if name in asked}
        wanted = [op for op in _writers(self.states) if op not in self._batches]
        names = [*(op.name for op in (*self._step, *wanted)), *self._deciders]
        copies = tf1.import_graph_def(self._definition, outer, names, name="step")
        done, copies = copies[: len(self._step)], copies[len(self._step) :]
        made.update(zip(wanted, copies))
        self.transfers = {op.name: made[op] for op in wanted if op.type.startswith(COLLECTIVE_TYPES)}
        made.update(zip(self._deciders, copies[len(wanted) :]))
        later = [
            _token_after(token, self._signal_tensors_after_writers(state, made))
            for state, token in zip(self.states, tokens)
        ]
        return [iteration_number + 1, _token_after(whole_step_token, done), *later]

    def _always_runs(self, op):
        return not self._guards[op] and not op.control_inputs and not op.inputs[0].op.inputs

    def _is_copied(self, name):
        return name.partition(":")[0] in self._copied_names and name not in self._fed

    def _add_dependencies(self, states, waits):
        for op, others in waits.items():
            kept = [name for name in self._nodes[op].input if not name.startswith("^")]
            self._nodes[op].input[:] = [*kept, *(f"^{other.name}" for other in others)]
        for state in states:
            has_token = state in self.states
            for op in state.writers if state.is_variable else ():
                self._nodes[op].input.append(_WHOLE)
            if not has_token:
                continue
            name = _token_name(state)
            if state.is_reference:
                for op, position in state.entrances:
                    if op not in state.writers:
                        self._nodes[op].input[position] = f"{name}:0"
                continue
            for op in state.readers if state.is_variable else state.writers:
                if op in self._nodes:
                    self._nodes[op].input.append(f"^{name}")
                    if op.type == _NEXT:
                        self._nodes[op].input.append(_WHOLE)

    def _signal_tensors_after_writers(self, state, copy_of_op):
        """Returns tensors that exist once all writers of a state are done, even if a condition skipped the writers."""
        by_guards: dict[Guards, list] = {}
        for op in state.writers:
            by_guards.setdefault(self._guards[op], []).append(copy_of_op[op])
        return [self._make_signal_after_ops(guards, ops, copy_of_op) for guards, ops in by_guards.items()]

    def _make_signal_after_ops(self, guards, ops, copies):
        # The outer condition first: it determines whether the inner decision is made.
        ordered = sorted(guards, key=lambda pair: len(self._guards_of_predicate(pair[0])))
        signal, others = tf.constant(True), []
        for name, value in ordered:
            predicate = copies[name] if name in copies else self._step[0].graph.get_tensor_by_name(name)
            sides = tf.raw_ops.Switch(data=signal, pred=predicate)
            signal = sides.output_true if value else sides.output_false
            others.append(sides.output_false if value else sides.output_true)
        signal = _token_after(signal, ops)
        for other in reversed(others):
            signal = tf.raw_ops.Merge(inputs=[signal, other]).output
        return signal

    def _guards_of_predicate(self, predicate_name):
        op = self._step[0].graph.get_operation_by_name(predicate_name.partition(":")[0])
        return self._guards.get(op, frozenset())


def _find_states(copied_ops: Sequence[tf.Operation]) -> list[_StateBetweenSteps]:
    """Returns the states that outlive a step, with the operators that use them."""
    states: dict[tf.Operation, _StateBetweenSteps] = {}
    step_ops = set(copied_ops)
    for op in copied_ops:
        if op.type.startswith(COLLECTIVE_TYPES):
            states[op] = _StateBetweenSteps(op, False, writers=[op])
        if op.type in _FORWARDING and _is_reference_to_state(op.inputs[0]):
            _record_state_access(op, 0, states, step_ops, is_use=False)
            continue
        for position, tensor in enumerate(op.inputs):
            if _is_reference_to_state(tensor):
                _record_state_access(op, position, states, step_ops, is_use=True)
    return list(states.values())


def _record_state_access(op, position, states, step_ops, is_use):
    """Records in `states` that an operator gets access to a state; without `is_use`, it may just forward the access."""
    (source,) = (each for each in search([op.inputs[position].op], _sources_of_access) if not _sources_of_access(each))
    state = states.setdefault(source, _StateBetweenSteps(source, source.type in VARIABLE_TYPES))
    if op.inputs[position].op not in step_ops:
        state.entrances.append((op, position))
    if is_use or (op.type in ("Identity", "Switch") and is_reference(op.inputs[position].dtype)):
        is_writer = not state.is_variable or changes_variable(op.type)
        users = state.writers if is_writer else state.readers
        if op not in users:
            users.append(op)


def _is_reference_to_state(tensor):
    return tensor.dtype == tf.resource or is_reference(tensor.dtype)


def _sources_of_access(op):
    """Returns [source] if `op` forwards access to a variable or other state from an operator `source`; else []."""
    return [op.inputs[0].op] if op.type in _FORWARDING and op.inputs and _is_reference_to_state(op.inputs[0]) else []


def _writers(states):
    return list(dict.fromkeys(op for state in states for op in state.writers))


def _token_name(state):
    return f"token_of_{state.source.name}"


def _token_after(token: tf.Tensor, ops: Iterable[Any]) -> tf.Tensor:
    """Returns a copy of `token`, a tensor that sets the order of operators; the copy waits for all `ops`, too."""
    with tf.control_dependencies(list(ops)):
        return tf.identity(token)


def _read_batch(op: tf.Operation, token: tf.Tensor, previous_step: tf.Tensor) -> tuple[tf.Operation, list[tf.Tensor]]:
    """Reads from an iterator. At the end of the data, TensorFlow raises its error only after the whole previous step.

    Returns:
      The operator that reads, and tensors that replace the outputs of `op`.
    """
    kinds = {"output_types": op.get_attr("output_types"), "output_shapes": op.get_attr("output_shapes")}
    iterator = op.inputs[0]
    with tf.control_dependencies([token]):
        batch = tf.raw_ops.IteratorGetNextAsOptional(iterator=iterator, **kinds)
    has_value = tf.raw_ops.OptionalHasValue(optional=batch)
    found = tf.raw_ops.OptionalGetValue(optional=tf.raw_ops.Switch(data=batch, pred=has_value).output_true, **kinds)
    with tf.control_dependencies([previous_step]):
        ended = tf.raw_ops.Switch(data=has_value, pred=has_value).output_false
    with tf.control_dependencies([tf.identity(ended)]):
        missing = tf.raw_ops.IteratorGetNext(iterator=iterator, **kinds)
    return batch.op, [tf.raw_ops.Merge(inputs=list(pair)).output for pair in zip(found, missing)]
