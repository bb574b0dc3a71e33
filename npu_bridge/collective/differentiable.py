"""Gradients of collective operations: an all-reduce sum has one, any other raises an error that says so."""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from npu_bridge.collective.communicator import Communicator


def sum_over_ranks(communicator: Communicator, tensor: tf.Tensor, name: str) -> tf.Tensor:
    """The sum of a dense tensor over the ranks; its gradient is the sum of the incoming gradients over the same ranks.

    The name of the transfer is the same on every rank; the gradient's has `_grad` appended.
    """

    @tf.custom_gradient
    def summed(value):
        def gradient(upstream):
            return sum_over_ranks(communicator, upstream, f"{name}_grad")

        return communicator.reduce(value, "sum", name), gradient

    return summed(tensor)


def without_gradient(result: Any, what: str) -> Any:
    """The same tensor, made by the call `what`, whose use in a backward pass is an error instead of a silent zero.

    Raises:
      LookupError: when it is differentiated.
    """
    if not (result.dtype.is_floating or result.dtype.is_complex):
        return result

    @tf.custom_gradient
    def passed_on(value):
        def gradient(upstream):
            raise LookupError(
                f"{what}: this collective has no gradient. Expected to differentiate an allreduce with 'sum'; got "
                f"{what}. Put tf.stop_gradient around its result, or write it with sums."
            )

        return tf.identity(value), gradient

    return passed_on(result)
