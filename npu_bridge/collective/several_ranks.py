"""Implements `SeveralRanks`: the part of a communicator that does not depend on the engine of the transfers."""

from __future__ import annotations

import abc

import tensorflow as tf

from npu_bridge.collective.communicator import Communicator
from npu_bridge.collective.transfer_tensors import (
    all_reduce_dtype,
    concatenated,
    prevent_folding,
    split_like,
    texts_of_rank,
)


class SeveralRanks(Communicator):
    """Ranks that are separate processes, whose tensors an engine sends."""

    @abc.abstractmethod
    def _sum_of_vector(self, vector, name, average):
        """Returns the sum of tensors over the ranks, in one transfer that starts as soon as the vector is there."""

    @abc.abstractmethod
    def _broadcast_numbers(self, tensor, root_rank, name):
        """Broadcasts tensors of all dtypes but strings, as `broadcast` does."""

    def all_reduce(self, tensors, name, average=True, prescale=1.0, after=()):
        results = [None] * len(tensors)
        for dtype, positions in _positions_by_dtype(tensors).items():
            wide = [tf.cast(tensors[position], all_reduce_dtype(dtype)) for position in positions]
            if prescale == 1.0:
                vector = concatenated(prevent_folding(wide))
            else:
                vector = concatenated(wide) * prevent_folding([tf.constant(prescale, wide[0].dtype)])[0]
            with tf.control_dependencies(after):
                vector = tf.identity(vector)
            total = self._sum_of_vector(vector, f"{name}_{dtype.name}", average)
            for position, tensor in zip(positions, split_like(total, wide)):
                results[position] = tf.cast(tensor, dtype)
        return results

    def all_true(self, flag, name):
        # Counts "no" votes: Sum is the only reduction that every Horovod controller has for int32.
        votes = tf.cast(tf.logical_not(flag), tf.int32)
        return tf.equal(self.reduce(votes, "sum", name), 0)

    def broadcast(self, tensor, root_rank, name):
        if tensor.dtype == tf.string:
            return texts_of_rank(root_rank, tensor, lambda part, of: self.all_gather(part, f"{name}_{of}"))
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
    """Groups list positions by dtype: one all-reduce holds one dtype."""
    groups = {}
    for position, tensor in enumerate(tensors):
        groups.setdefault(tf.as_dtype(tensor.dtype).base_dtype, []).append(position)
    return groups
