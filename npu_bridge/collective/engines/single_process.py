"""Implements `SingleProcess`: collective operations of a process that trains alone; they return their inputs."""

from __future__ import annotations

import tensorflow as tf

from npu_bridge.collective.engines.communicator import Communicator


class SingleProcess(Communicator):
    """A communicator with one rank; its operations return their inputs and add no op to the graph.

    Args:
      world_rank: this process's rank in the job, for a group with no other member.
    """

    rank = 0
    size = 1
    local_rank = 0
    local_size = 1

    def __init__(self, world_rank=0):
        self.members = (world_rank,)

    def all_reduce(self, tensors, name, average=True, prescale=1.0, after=()):
        return [tensor if prescale == 1.0 else tensor * tf.cast(prescale, tensor.dtype) for tensor in tensors]

    def reduce(self, tensor, reduction, name):
        return tensor

    def reduce_scatter(self, tensor, reduction, name):
        return tensor

    def all_gather(self, tensor, name):
        return tensor

    def all_true(self, flag, name):
        return flag

    def broadcast(self, tensor, root_rank, name):
        return tensor

    def broadcast_variables(self, variables, root_rank):
        return None if tf.executing_eagerly() else tf.no_op()

    def all_to_all(self, tensor, counts, name):
        return tensor, tf.cast(counts, tf.int32)

    def exchange_integers(self, numbers, exchange_name, group_text="its group"):
        return [list(numbers)]

    def open_groups(self, groups, exchange_name):
        return []
