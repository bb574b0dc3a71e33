"""Implements `SeveralRanks`, the part of a communicator that is the same for all engines."""

from __future__ import annotations

import abc

import tensorflow as tf

from npu_bridge.collective.engines.communicator import Communicator
from npu_bridge.collective.engines.transfer_tensors import (
    all_reduce_dtype,
    broadcast_strings,
    concatenate,
    prevent_folding,
    split_like,
)


class SeveralRanks(Communicator):
    """The base class of communicators of several processes, connected by Horovod or by TensorFlow itself."""

    @abc.abstractmethod
    def _sum_vector(self, vector, name, average):
        """Sums or averages a vector over the ranks, in one all-reduce that starts as soon as the vector is computed."""

    @abc.abstractmethod
    def _broadcast_numbers(self, tensor, root_rank, name):
        """Broadcasts a tensor of any dtype except strings; arguments as for `broadcast`."""

    def _wide_dtype(self, dtype):
        """Returns the dtype in which the engine combines tensors of `dtype`."""
        return all_reduce_dtype(dtype)

    def all_reduce(self, tensors, name, average=True, prescale=1.0, after=()):
        results = [None] * len(tensors)
        for dtype, positions in _positions_by_dtype(tensors).items():
            wide = [tf.cast(tensors[position], self._wide_dtype(dtype)) for position in positions]
            if prescale == 1.0:
                vector = concatenate(prevent_folding(wide))
            else:
                vector = concatenate(wide) * prevent_folding([tf.constant(prescale, wide[0].dtype)])[0]
            with tf.control_dependencies(after):
                vector = tf.identity(vector)
            total = self._sum_vector(vector, f"{name}_{dtype.name}", average)
            for position, tensor in zip(positions, split_like(total, wide)):
                results[position] = tf.cast(tensor, dtype)
        return results

    def all_true(self, flag, name):
        # Counts "no" votes: Sum is the only reduction that every Horovod controller has for int32.
        votes = tf.cast(tf.logical_not(flag), tf.int32)
        return tf.equal(self.reduce(votes, "sum", name), 0)

    def broadcast(self, tensor, root_rank, name):
        if tensor.dtype == tf.string:
            return broadcast_strings(root_rank, tensor, lambda part, of: self.all_gather(part, f"{name}_{of}"))
        return self._broadcast_numbers(tensor, root_rank, name)

    def broadcast_variables(self, variables, root_rank):
        assigned = [
            variable.assign(
                # Named by position: a variable's name includes its scopes, which can differ between ranks.
                self.broadcast(tf.convert_to_tensor(variable), root_rank, f"broadcast_{position}")
            )
            for position, variable in enumerate(variables)
        ]
        return None if tf.executing_eagerly() else tf.group(*assigned)


def _positions_by_dtype(tensors):
    """Returns the positions of tensors by dtype, because an all-reduce has one dtype."""
    groups = {}
    for position, tensor in enumerate(tensors):
        groups.setdefault(tf.as_dtype(tensor.dtype).base_dtype, []).append(position)
    return groups
