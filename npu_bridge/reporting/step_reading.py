"""Reads TensorFlow's record of a training step: when each operator ran, and for which purpose.

The purpose of an operator comes from the graph that was really run. TensorFlow returns this graph along with the times;
its rewriter has renamed, joined and removed operators.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from npu_bridge.base.search import search
from npu_bridge.graph.recorded import OperatorEvent, events_of
from npu_bridge.graph.run import TRANSFER_TYPES, sends_gradients
from npu_bridge.graph.variables import changes_variable
from npu_bridge.reporting.step_trace import Interval, StepTrace, Transfer, merge_intervals

_FRAGMENT = re.compile(r"_fragment_(\d+)")
_INTEGERS = (3, 9)  # DT_INT32 and DT_INT64
# These operators only wait for another device.
_WAITING = ("_Recv", "_HostRecv")
_BETWEEN_STEPS = ("NextIteration", "RefNextIteration")
# The operators inside these are recorded, too, unless XLA compiles them.
_CALLS = re.compile(r"(Stateful|Stateless)?(PartitionedCall|If|Case|While)")
# Operators that make up a loop. Constants in a loop are computed as soon as a step can begin.
_IDLE = (*_BETWEEN_STEPS, "Const", "Enter", "Exit", "LoopCond", "Merge", "RefEnter", "RefSwitch", "Switch")


def read_step(metadata: Any, step: int, rank: int) -> StepTrace:
    """Makes a trace from the record of a session run.

    The record does not show how long a transfer waited for other ranks, so `wire_ms` is the end of the previous
    transfer. If the run repeats a step in a loop of the graph, the trace is of the last step.

    Args:
      metadata: RunMetadata of a run with a trace level and `output_partition_graphs`.
      step: number of the step.
      rank: this rank.
    Raises:
      ValueError: nothing was recorded.
    """
    nodes = {node.name: node for graph in metadata.partition_graphs for node in graph.node}
    events = list(events_of(metadata.step_stats))
    if not events:
        raise ValueError(f"timeline: TensorFlow recorded no operator of step {step}.")
    purposes = _OpPurposes(nodes)
    sent = [event.name for event in events if event.name in purposes.transfers]
    if len(sent) > len(set(sent)):
        return read_overlapping_steps(metadata, step, rank)[-1]
    return _make_trace(events, purposes, step, rank)


def read_overlapping_steps(metadata: Any, last_step: int, rank: int) -> list[StepTrace]:
    """Makes a trace for each step from the record of a run that repeats a step in a loop of the graph.

    Operators that do not run in every step, such as those of a condition, are left out.

    Args:
      metadata: RunMetadata of a run with a trace level and `output_partition_graphs`.
      last_step: number of the last step.
      rank: this rank.
    """
    nodes = {node.name: node for graph in metadata.partition_graphs for node in graph.node}
    # Operators that wait for a transfer of the previous step do not belong to the previous step.
    purposes = _OpPurposes({name: node for name, node in nodes.items() if node.op not in _BETWEEN_STEPS})
    found: dict[str, list[OperatorEvent]] = {}
    for event in events_of(metadata.step_stats):
        if event.name in nodes and nodes[event.name].op not in _IDLE:
            found.setdefault(event.name, []).append(event)
    steps = max((len(found.get(name, ())) for name in purposes.transfers), default=0)
    repeated = [sorted(events, key=lambda event: event.begin) for events in found.values() if len(events) == steps]
    first = last_step - steps + 1
    return [_make_trace(events, purposes, first + number, rank) for number, events in enumerate(zip(*repeated))]


def _make_trace(events: Sequence[OperatorEvent], purposes: _OpPurposes, step: int, rank: int) -> StepTrace:
    begin, end = min(event.begin for event in events), max(event.end for event in events)

    def to_trace_ms(time):
        return round((time - begin) / 1000, 4)

    def merge_event_times(chosen) -> tuple[Interval, ...]:
        return tuple(merge_intervals((to_trace_ms(event.begin), to_trace_ms(event.end)) for event in chosen))

    computing = [event for event in events if purposes.is_computation(event.name)]
    ends_before_gradients = [event.end for event in computing if event.name in purposes.before]
    return StepTrace(
        step=step,
        rank=rank,
        start_secs=begin / 1e6,
        duration_ms=to_trace_ms(end),
        backward_end_ms=to_trace_ms(max(ends_before_gradients or [event.end for event in computing] or [begin])),
        compute=merge_event_times(computing),
        updates=merge_event_times(event for event in events if event.name in purposes.updates),
        transfers=_make_transfers(
            [event for event in events if event.name in purposes.transfers], purposes, to_trace_ms
        ),
    )


def _make_transfers(events, purposes, to_trace_ms):
    transfers, before = [], 0.0
    for event in sorted(events, key=lambda event: event.end):
        fragment = _FRAGMENT.search(event.name)
        begin_ms, end_ms = to_trace_ms(event.begin), to_trace_ms(event.end)
        transfers.append(
            Transfer(
                name=event.name,
                begin_ms=begin_ms,
                wire_ms=min(max(begin_ms, before), end_ms),
                end_ms=end_ms,
                fragment=int(fragment[1]) if fragment else None,
                is_decision=event.name in purposes.decisions,
                size_bytes=event.size_bytes,
            )
        )
        before = end_ms
    return tuple(transfers)


class _OpPurposes:
    """The operators of a graph by purpose.

    Attributes:
      transfers: names of the operators that communicate with other ranks.
      decisions: names of the transfers of one integer.
      updates: names of the operators that wait for a transfer, or change variables. Includes copies of a gradient
        that wait for another transfer: such a copy does not show when the gradient was ready.
      before: names of the other operators from which gradients are computed: forward and backward pass.
    """

    def __init__(self, nodes: Mapping[str, Any]):
        self._nodes = nodes
        self.transfers = {name for name, node in nodes.items() if TRANSFER_TYPES.match(node.op)}
        self.decisions = {name for name in self.transfers if _is_integer_all_reduce(nodes[name])}
        gradients = self.transfers - self.decisions
        gradients = {name for name in gradients if sends_gradients(name, nodes[name].op)} or gradients
        written = {name for name, node in nodes.items() if changes_variable(node.op)}
        sources, waiting = _list_inputs_by_node(nodes), _map_nodes_to_waiting_nodes(nodes)
        after = set(search(gradients | self.decisions, lambda name: waiting.get(name, ())))
        self.updates = (after | written) - self.transfers
        self.before = set(search(gradients or written, lambda name: sources.get(name, ())))
        self.before -= self.updates | self.transfers

    def is_computation(self, name: str) -> bool:
        """Returns whether an operator belongs to the forward or backward pass, or has no particular purpose."""
        node = self._nodes.get(name)
        if name in self.updates or name in self.transfers:
            return False
        return node is None or not (node.op in _WAITING or _calls_functions(node))


def _calls_functions(node):
    return _CALLS.fullmatch(node.op) and not node.attr["_XlaMustCompile"].b


def _is_integer_all_reduce(node):
    return node.op in ("HorovodAllreduce", "CollectiveReduceV2") and node.attr["T"].type in _INTEGERS


def _list_inputs_by_node(nodes, with_control_inputs: bool = False) -> dict[str, list[str]]:
    """Returns, for each node, the nodes whose outputs it reads; `with_control_inputs` adds those it only waits for."""
    senders = {node.attr["tensor_name"].s: name for name, node in nodes.items() if node.op in ("_Send", "_HostSend")}
    found = {}
    for name, node in nodes.items():
        chosen = (source for source in node.input if with_control_inputs or not source.startswith("^"))
        found[name] = [source.lstrip("^").partition(":")[0] for source in chosen]
        if node.op in _WAITING and node.attr["tensor_name"].s in senders:
            found[name].append(senders[node.attr["tensor_name"].s])
    return found


def _map_nodes_to_waiting_nodes(nodes) -> dict[str, list[str]]:
    """Returns, for each node, the nodes that wait for it."""
    waiting: dict[str, list[str]] = {}
    for name, sources in _list_inputs_by_node(nodes, with_control_inputs=True).items():
        for source in sources:
            waiting.setdefault(source, []).append(name)
    return waiting
