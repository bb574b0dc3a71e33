"""Averaging gradients over the ranks, fragment by fragment."""

from __future__ import annotations

import tensorflow as tf

from npu_bridge import collective
from npu_bridge.collective import fragments
from npu_bridge.gradients.dense_or_sparse import map_values, sum_repeated_rows
from npu_bridge.gradients.stage import Stage


class AllReduce(Stage):
    """Replaces every gradient by its mean over the ranks; does nothing when one process trains alone.

    Dense gradients travel in aggregation fragments, in the order they become ready. A sparse gradient travels by
    gathering its rows, after rows with the same index were added up, and stays sparse.

    Scaled gradients are multiplied by a power of two not above 1 / ranks on their way into the sum, which loses no
    bits and keeps a sum of finite values finite; the rest of the mean is left to the division by the loss scale. When
    the decision about the step is known early, only the last fragment waits for it.

    Args:
      name: prefix of the transfers' names; the same on every rank.
    Graph: name scope `<name>_Allreduce`.
    """

    communicates = True

    def __init__(self, name: str):
        self._name = name

    def reduce(self, step):
        communicator = collective.current()
        if communicator.size == 1:
            return
        is_scaled = step.divisor is not None
        prescale = fragments.lossless_prescale(communicator.size) if is_scaled else 1.0
        with tf.name_scope(f"{self._name}_Allreduce"):
            gradients = [grad for grad, _ in step.grads_and_vars]
            reduced = self._reduce_sparse(gradients, communicator, is_scaled, prescale)
            reduced.update(self._reduce_dense(gradients, communicator, is_scaled, prescale, step.should_apply))
        step.grads_and_vars = [
            (reduced.get(position), variable) for position, (_, variable) in enumerate(step.grads_and_vars)
        ]
        if is_scaled and communicator.size * prescale != 1.0:
            step.multiplied_by(communicator.size * prescale)

    def _reduce_dense(self, gradients, communicator, is_scaled, prescale, decision):
        dense = [position for position, grad in enumerate(gradients) if isinstance(grad, tf.Tensor)]
        ready = sorted(dense, key=_readiness_of(gradients))
        sizes_bytes = [_static_bytes(gradients[position]) for position in ready]
        cut = [[ready[index] for index in fragment] for fragment in fragments.cut_by_size(sizes_bytes)]
        results = {}
        for number, positions in enumerate(cut):
            tensors = [gradients[position] for position in positions]
            if decision is not None and number == len(cut) - 1:
                with tf.control_dependencies([decision]):
                    tensors = [tf.identity(tensor) for tensor in tensors]
            reduced = communicator.all_reduce(
                tensors, name=f"{self._name}_fragment_{number}", average=not is_scaled, prescale=prescale
            )
            results.update(zip(positions, reduced))
        return results

    def _reduce_sparse(self, gradients, communicator, is_scaled, prescale):
        weight = prescale if is_scaled else 1.0 / communicator.size
        results = {}
        for position, grad in enumerate(gradients):
            if isinstance(grad, tf.IndexedSlices):
                local = map_values(sum_repeated_rows(grad), lambda values: values * tf.cast(weight, values.dtype))
                name = f"{self._name}_sparse_{position}"
                results[position] = tf.IndexedSlices(
                    communicator.all_gather(local.values, f"{name}_values"),
                    communicator.all_gather(local.indices, f"{name}_indices"),
                    grad.dense_shape,
                )
        return results


def _readiness_of(gradients):
    """A sort key for positions: the order in which the backward pass delivers the gradients.

    In a graph that is the order in which their ops were made, since backpropagation builds them from the loss
    down; executed eagerly, the reverse of the variables' order.
    """
    if tf.executing_eagerly():
        return lambda position: -position
    made = {op: number for number, op in enumerate(tf.compat.v1.get_default_graph().get_operations())}
    return lambda position: (made.get(gradients[position].op, len(made)), position)


def _static_bytes(tensor):
    """Bytes of a tensor as far as its static shape tells; 0 for an unknown shape."""
    return (tensor.shape.num_elements() or 0) * tensor.dtype.size
