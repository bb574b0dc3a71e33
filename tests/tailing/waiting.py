"""Which ops of a graph wait for which, read from the graph alone; written without looking at any pass."""

from __future__ import annotations

from tests.transfers import is_transfer

_PREFIXES_OF_WRITES = ("ResourceApply", "Apply", "ResourceSparseApply", "SparseApply", "ResourceScatter", "ScatterAdd")
_COUNTERS = ("power", "global_step", "iter", "loss_scale", "good_steps", "bad_steps")
WRITES = ("Assign", "AssignVariableOp", "AssignAddVariableOp", "AssignSubVariableOp", "AssignAdd", "AssignSub")


class Node:
    """An op of a graph or a node of a graph proto.

    Attributes:
      data, control: names of the nodes it reads from, and of those it waits for otherwise.
    """

    def __init__(self, name, kind, data, control):
        self.name, self.kind, self.data, self.control = name, kind, data, control


def nodes_of_graph(graph):
    """The nodes of a `tf.Graph` by name."""
    return {
        op.name: Node(op.name, op.type, [tensor.op.name for tensor in op.inputs], [c.name for c in op.control_inputs])
        for op in graph.get_operations()
    }


def nodes_of_proto(graph_def):
    """The nodes of a GraphDef by name, those that a runtime has built from branches among them."""
    nodes = {}
    for node in graph_def.node:
        data = [name.split(":")[0] for name in node.input if not name.startswith("^")]
        nodes[node.name] = Node(node.name, node.op, data, [name[1:] for name in node.input if name.startswith("^")])
    return nodes


def nodes_of_run(metadata):
    """The nodes of the graph that a run with `output_partition_graphs` has executed."""
    nodes = {}
    for partition in metadata.partition_graphs:
        nodes.update(nodes_of_proto(partition))
    return nodes


def is_update(node):
    return node.kind in WRITES or node.kind.startswith(_PREFIXES_OF_WRITES)


def gradient_transfers(nodes):
    """Names of the Horovod ops, without the decisions."""
    horovod = (node.name for node in nodes.values() if is_transfer(node.kind))
    return [name for name in horovod if "decision" not in name and "tail_optimization" not in name]


def superfluous_waits(nodes, results=()):
    """Returns where the tail is too long: pairs of a transfer without waiting transfers and a node that waits for it.

    Ops that can wait for it are computed from it, or only keep the books after a step, which nothing else waits for.

    Args:
      nodes: the nodes of a graph by name.
      results: names of other nodes that have to be early, besides updates of variables, transfers and decisions.
    """
    transfers = gradient_transfers(nodes)
    updates = {node.name for node in nodes.values() if is_update(node) and not is_counter(variable_of(node, nodes))}
    horovod = {node.name for node in nodes.values() if is_transfer(node.kind)}
    found = []
    for transfer in transfers:
        waiting = waiting_for(nodes, [transfer])
        if not waiting.intersection(transfers) - {transfer}:
            late = waiting & (updates | horovod | set(results)) - {transfer}
            found += [(transfer, name) for name in sorted(late - computed_from(nodes, [transfer]))]
    return found


def variable_of(update, nodes):
    """Returns the name of the variable that an update writes, also if it arrives through switches."""
    node = nodes[update.data[0]]
    while node.kind in ("Switch", "RefSwitch", "Identity"):
        node = nodes[node.data[0]]
    return node.name


def is_counter(name):
    """Returns whether a variable counts steps; it is updated after the step, as in the optimizers themselves."""
    return any(word in name for word in _COUNTERS)


def waiting_for(nodes, awaited):
    """Names of the nodes that cannot run before one of `awaited` has run.

    A merge runs as soon as one of its inputs is there, so it waits only for what all of them wait for.
    """
    return _reached(nodes, awaited, lambda node: node.data + node.control, merge=all)


def computed_from(nodes, sources):
    """Names of the nodes whose values contain those of `sources`.

    Data alone, and not what merely decides; and what is read of a variable after it was written.
    """

    def values_of(node):
        if node.kind.endswith("Switch"):
            return node.data[:1]
        written = [name for name in node.control if node.kind == "ReadVariableOp" and is_update(nodes[name])]
        return node.data + written

    return _reached(nodes, sources, values_of, merge=any)


def _reached(nodes, sources, inputs_of, merge):
    answers = dict.fromkeys(sources, True)
    for name in _inputs_first(nodes):
        if name not in answers:
            node = nodes[name]
            combine = merge if node.kind in ("Merge", "RefMerge") else any
            answers[name] = combine([answers.get(before, False) for before in inputs_of(node)] or [False])
    return {name for name, answer in answers.items() if answer}


def _inputs_first(nodes):
    """Returns the names in an order in which every node comes after its inputs."""
    done, order = set(), []
    for start in nodes:
        stack = [(start, False)]
        while stack:
            name, is_left = stack.pop()
            if is_left:
                order.append(name)
            elif name not in done and name in nodes:
                done.add(name)
                stack.append((name, True))
                stack.extend((before, False) for before in nodes[name].data + nodes[name].control)
    return order
