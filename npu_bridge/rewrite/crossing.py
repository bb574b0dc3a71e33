"""The pass that lets training steps in a loop of the graph overlap: a step begins while the one before goes on.

In the ordinary loop (`loop.py`) a step waits for the whole step before it. Here a token goes from step to step for each
variable, so that the forward pass starts with the layers whose variables are ready. The numbers are the same, as
everything that outlives a step is used in the order of the steps (`step_order.py`).

Two steps are under way at most. When the data ends, the step that finds nothing fails only after the one before it is
done: what was trained stays trained. Any other error may leave that step half done.
"""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Iterable

import tensorflow as tf

from npu_bridge.rewrite.loop_nodes import InGraphLoop, LoopNodes, copy_name, ops_inside
from npu_bridge.rewrite.need_order import add_order_of_need, find_free_order
from npu_bridge.rewrite.step_order import NEXT_BATCH, StepOrder

_STEPS_UNDER_WAY = 2
_WHOLE_STEP = "whole_step"


def put_in_crossing_loop(graph: tf.Graph, step: Iterable[tf.Operation], fed: Collection[str] = ()) -> InGraphLoop:
    """Makes a loop whose iterations overlap, with the numbers of iterations that do not.

    Transfers between ranks are copied as well, under names of their own: every rank must run the same loop, which is
    so where fingerprints are the same.

    Args:
      graph: a TF 1 graph that is not finalized.
      step: the operators that make up a training step.
      fed: names of tensors whose value is given with the run; every iteration gets the same one.
    Raises:
      NotLoopableError: the step holds something that is not understood. The graph is as it was.
    Graph: name scope `iteration_loop`, with a copy of all that the step computes.
    Ranks: local; to run the loop is collective where the step exchanges anything.
    """
    step, fed = list(step), frozenset(fed)
    inside = ops_inside(step, fed)
    loop = _CrossingLoop(graph, step, inside, fed)
    op, count = loop.nodes.import_into(graph, loop.end)
    return InGraphLoop(op, count, loop.fingerprint())


class _CrossingLoop:
    """The nodes of a loop in which steps hand over one by one what they are done with.

    Attributes:
      nodes: the nodes.
      end: the one that waits for the whole loop.
    """

    def __init__(self, graph, step, inside, fed):
        self._graph = graph
        self._fed = fed
        self._order = StepOrder(inside, fed)
        self._otherwise: dict[frozenset, str] = {}
        self.nodes = LoopNodes(inside, fed, parallel_iterations=_STEPS_UNDER_WAY)
        self.nodes.count_on()
        tokens = {f"token_{number}": handover for number, handover in enumerate(self._order.handovers)}
        self._waits = self._waits_by_op(tokens)
        self._copy_all(inside)
        for token, handover in tokens.items():
            self._hand_on(token, handover.done)
        self._hand_on(_WHOLE_STEP, step)
        ends = ["^exit", *(f"^{token}/exit" for token in (*tokens, _WHOLE_STEP))]
        self.end = self.nodes.add("end", "NoOp", ends)

    def fingerprint(self):
        """A number for what is computed and in which order, not for constants; 0 where nothing goes between ranks."""
        nodes = self.nodes.graph_def.node
        if not any(node.op.startswith("Horovod") for node in nodes):
            return 0
        # TensorFlow keeps what an operator waits for in no order.
        text = "\n".join(" ".join((node.name, node.op, *sorted(node.input))) for node in nodes)
        return int.from_bytes(hashlib.sha256(text.encode()).digest()[:7], "big") + 1

    def _waits_by_op(self, tokens):
        waits: dict[str, list[str]] = {}
        for token, handover in tokens.items():
            for op in handover.waiting:
                waits.setdefault(op.name, []).append(f"{token}/here")
        for name in self._order.wait_for_all:
            waits.setdefault(name, []).append(f"{_WHOLE_STEP}/here")
        # Where there is no batch, nothing is changed either.
        batches = [op for op in self._order.ordered if op.type == NEXT_BATCH]
        if not any(self._order.waited_for(op) for op in batches):
            for name in self._order.writers:
                waits.setdefault(name, []).extend(map(copy_name, batches))
        return waits

    def _copy_all(self, inside):
        free = find_free_order(self._order)
        for name, turn in add_order_of_need(self.nodes, self._order, free).items():
            self._waits.setdefault(name, []).append(turn)
        # First, as others read from nodes that take their place.
        for op in inside:
            if op.type == NEXT_BATCH:
                self._copy_next_batch(op)
        for op in inside:
            if op.type != NEXT_BATCH:
                self.nodes.copy(op, self._waits.get(op.name, ()), free.not_for.get(op.name, ()))

    def _copy_next_batch(self, op):
        """Takes the next batch if there is one; else fails like the original, once the step before is done."""
        name, add = f"next_batch/{op.name}", self.nodes.add
        types = {key: op.node_def.attr[key] for key in ("output_types", "output_shapes")}
        inputs = self.nodes.inputs_of(op, self._waits.get(op.name, ()))
        batch = add(f"{name}/optional", "IteratorGetNextAsOptional", inputs, **types)
        is_there = add(f"{name}/is_there", "OptionalHasValue", [batch])
        either = add(f"{name}/either", "Switch", [batch, is_there], T=tf.variant)
        value = add(f"{name}/value", "OptionalGetValue", [f"{either}:1"], **types)
        is_over = add(f"{name}/is_over", "Identity", [either], T=tf.variant)
        self.nodes.copy(op, [is_over, f"{_WHOLE_STEP}/here"], name=f"{name}/fails")
        merged = []
        for number, out in enumerate(op.outputs):
            sides = [f"{value}:{number}", f"{name}/fails:{number}"]
            merged.append(add(f"{name}/merge_{number}", "Merge", sides, T=out.dtype, N=2))
            if out.name not in self._fed:
                self.nodes.replace(out, merged[-1])
        add(copy_name(op), "NoOp", [f"^{node}" for node in merged])

    def _hand_on(self, token, done):
        """A token that is in a step when some operators of the step before are done."""
        add = self.nodes.add
        add(f"{token}/merge", "Merge", ["first", f"{token}/next"], T=tf.int64, N=2)
        add(f"{token}/either", "Switch", [f"{token}/merge", "goes_on"], T=tf.int64)
        add(f"{token}/exit", "Exit", [f"{token}/either"], T=tf.int64)
        add(f"{token}/here", "Identity", [f"{token}/either:1"], T=tf.int64)
        ends = [f"^{node}" for node in self._ends(token, done)]
        add(f"{token}/done", "Identity", [f"{token}/here", *ends], T=tf.int64)
        add(f"{token}/next", "NextIteration", [f"{token}/done"], T=tf.int64)

    def _ends(self, token, ops):
        """Nodes that are done when some operators are, or when it is known that these have nothing to do."""
        by_conditions: dict[frozenset, list[str]] = {}
        for op in ops:
            by_conditions.setdefault(self._order.conditions[op.name], []).append(copy_name(op))
        ends = by_conditions.pop(frozenset(), [])
        for number, (conditions, copies) in enumerate(by_conditions.items()):
            done = self.nodes.add(
                f"{token}/done_{number}", "Identity", ["iteration", *(f"^{copy}" for copy in copies)], T=tf.int64
            )
            sides = [done, self._where_not(conditions)]
            ends.append(self.nodes.add(f"{token}/either_way_{number}", "Merge", sides, T=tf.int64, N=2))
        return ends

    def _where_not(self, conditions):
        """An output that is there when conditions do not all hold."""
        if conditions not in self._otherwise:
            name, add = f"conditions_{len(self._otherwise)}", self.nodes.add
            holds = ""
            for number, condition in enumerate(sorted(conditions)):
                each = self.nodes.source(self._graph.get_tensor_by_name(condition.predicate))
                if not condition.side:
                    each = add(f"{name}/not_{number}", "LogicalNot", [each])
                holds = add(f"{name}/and_{number}", "LogicalAnd", [holds, each]) if holds else each
            self._otherwise[conditions] = add(f"{name}/otherwise", "Switch", ["iteration", holds], T=tf.int64)
        return self._otherwise[conditions]
