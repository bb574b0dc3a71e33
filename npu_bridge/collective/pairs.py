"""Send and receive between two ranks, as a broadcast in a group of these two."""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from npu_bridge.collective.communicator import Communicator


def send_to(pair: Communicator, tensor: tf.Tensor, tag: int) -> tf.Operation:
    """The op that sends a numeric tensor to the other rank of a pair; `tag` is what the receiver asks for."""
    source = pair.rank
    sent = pair.broadcast(tensor, source, _name(pair, source, tag))
    # Stateful, so that it also runs when it is only a control dependency, and without output.
    return tf.raw_ops.Assert(condition=True, data=[sent])


def receive_from(pair: Communicator, shape: Any, dtype: tf.DType, tag: int) -> tf.Tensor:
    """Receives a tensor of known shape and dtype from the other rank of a pair; arguments as `send_to`."""
    source = 1 - pair.rank
    return pair.broadcast(tf.zeros(shape, dtype), source, _name(pair, source, tag))


def _name(pair, source, tag):
    # A second transfer with the same tag gets the same number on both sides.
    sender, receiver = pair.members[source], pair.members[1 - source]
    return f"hccl_p2p_{sender}_to_{receiver}_tag_{tag}"
