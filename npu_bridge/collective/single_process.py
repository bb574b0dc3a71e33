"""The communicator of a process that trains alone."""

from __future__ import annotations

import tensorflow as tf

from npu_bridge.collective.communicator import Communicator


class SingleProcess(Communicator):
    """One rank of one: every operation is the identity and adds no op to the graph."""

    rank = 0
    size = 1
    local_rank = 0
    local_size = 1

    def all_reduce(self, tensors, name, average=True, prescale=1.0):
        return [tensor if prescale == 1.0 else tensor * tf.cast(prescale, tensor.dtype) for tensor in tensors]

    def all_gather(self, tensor, name):
        return tensor

    def all_true(self, flag, name):
        return flag

    def broadcast_variables(self, variables, root_rank):
        return None if tf.executing_eagerly() else tf.no_op()

    def number_of_root(self, number, root_rank):
        return number
