"""Random numbers in a loop of the graph that go on where the operator outside it has stopped, and the other way round.

A seeded operator keeps its place in the stream of numbers in its kernel, and a session keeps such kernels by the name
of the node (TensorFlow 2.15). So a node in the loop that gets the name of the original shares its kernel. A graph
cannot have two nodes of one name. But where TensorFlow puts the body of a function in the place of a call, a node
`random_uniform/RandomUniform` of a call `dropout` becomes the node `dropout/random_uniform/RandomUniform`. That is
while a run of the loop is prepared, and there the original has been left out.

Whether it was done has to be looked up in the session: see `InGraphLoop.shared`.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

import tensorflow as tf

from npu_bridge.rewrite.loop_nodes import LoopNodes, copy_name
from npu_bridge.tf_internals.graphs import creation_number, update_input

# What keeps a generator of random numbers in the operator itself.
RANDOM = frozenset(
    {
        "Multinomial",
        "ParameterizedTruncatedNormal",
        "RandomGamma",
        "RandomPoissonV2",
        "RandomShuffle",
        "RandomStandardNormal",
        "RandomUniform",
        "RandomUniformInt",
        "TruncatedNormal",
    }
)


def draws_unseeded_numbers(op: tf.Operation) -> bool:
    """Whether an operator draws random numbers that are others in every session, as nobody gave a seed."""
    return op.type in RANDOM and op.get_attr("seed") == 0 and op.get_attr("seed2") == 0


def name_of_call(op: tf.Operation, taken: Collection[str]) -> str:
    """The name a call must have so that an operator in its function gets the name of this one; empty if there is none.

    Args:
      op: a random operator of a graph.
      taken: names that other calls will have.
    """
    call, _, inner = op.name.rpartition("/")
    while call and (call in taken or _has_op(op.graph, call)):
        call = call.rpartition("/")[0]
    return call


def add_function(nodes: LoopNodes, op: tf.Operation, call: str) -> str:
    """Adds a function that computes nothing but an operator.

    Args:
      nodes: those of the loop.
      op: the operator.
      call: what `name_of_call` gave for it.
    Returns:
      The function's name.
    """
    function = nodes.graph_def.library.function.add()
    function.signature.name = f"iteration_loop_draw_{creation_number(op)}_{len(call)}"
    function.signature.is_stateful = True
    node = function.node_def.add()
    node.CopyFrom(op.node_def)
    node.name = op.name[len(call) + 1 :]
    node.attr.pop("_class", None)
    del node.input[:]
    for number, tensor in enumerate(op.inputs):
        function.signature.input_arg.add(name=f"input_{number}", type=tensor.dtype.as_datatype_enum)
        node.input.append(f"input_{number}")
    for kind, tensor in zip(op.op_def.output_arg, op.outputs):
        function.signature.output_arg.add(name=kind.name, type=tensor.dtype.as_datatype_enum)
        function.ret[kind.name] = f"{node.name}:{kind.name}:0"
    return function.signature.name


def add_place_of_call(nodes: LoopNodes, op: tf.Operation, reads: Sequence[tf.Tensor] | None) -> None:
    """Adds a copy of a random operator whose place a call will take, and what others read and wait for instead.

    TensorFlow sorts what it adds up by name, and so rounds as outside only where copies are named alike. So a node that
    does nothing, and that TensorFlow does not leave out, has the name of the copy.

    Args:
      nodes, op: as in `add_function`.
      reads: tensors that the copy reads instead of the operator's inputs.
    """
    nodes.copy(op, name=place_of_call(op), reads=reads)
    (drawn,) = op.outputs
    nodes.add(copy_name(op), "EnsureShape", [place_of_call(op)], T=drawn.dtype, shape=drawn.shape)


def place_of_call(op: tf.Operation) -> str:
    """The node of the loop whose place a call takes."""
    return f"drawn/{op.name}"


def draw_in_call(copy: tf.Operation, call: str, function: str) -> None:
    """Lets everything that reads a copy of a random operator read a call instead.

    Args:
      copy: what has the place of the call in the loop; no session knows it.
      call: name of the call.
      function: name of the function.
    """
    kind = tf.compat.v1.AttrValue
    types = {
        key: kind(list=kind.ListValue(type=[tensor.dtype.as_datatype_enum for tensor in tensors]))
        for key, tensors in (("Tin", copy.inputs), ("Tout", copy.outputs))
    }
    called = kind(func=tf.compat.v1.NameAttrList(name=function))
    with copy.graph.as_default(), tf.device(None), tf.control_dependencies(None):
        with tf.control_dependencies(copy.control_inputs):
            drawn = copy.graph.create_op(
                "StatefulPartitionedCall",
                list(copy.inputs),
                [tensor.dtype for tensor in copy.outputs],
                name=f"{call}/",  # exactly this one, although it is the name of a scope
                attrs={**types, "f": called},
            )
    for old, new in zip(copy.outputs, drawn.outputs):
        new.set_shape(old.shape)
        for reader in old.consumers():
            for number, tensor in enumerate(reader.inputs):
                if tensor.name == old.name:
                    update_input(reader, number, new)


def _has_op(graph, name):
    try:
        graph.get_operation_by_name(name)
    except KeyError:
        return False
    return True
