"""Defines `NPUStrategy`: the distribution strategy of one device per process."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import tensorflow as tf

from npu_bridge import collective
from npu_bridge.base.errors import message, shown
from npu_bridge.base.tf_internals.callers import is_called_by_keras
from npu_bridge.collective import wire_names

__all__ = ["NPUStrategy"]


class NPUStrategy(tf.compat.v1.distribute.OneDeviceStrategy):
    """A strategy with one replica per rank, which leaves the reduction of gradients to a distributed optimizer.

    Pass it as `RunConfig(train_distribute=NPUStrategy())` or use its `scope()`. The strategy does not reduce gradients:
    wrap the optimizer with `npu_distributed_optimizer_wrapper`. The wrapper averages gradients, so neither Estimators
    nor Keras divide the loss by the number of ranks: inside a replica, this number is 1. In a loop of your own,
    `experimental_distribute_dataset` shards the data. For Estimators and `fit`, shard the data in the script. A
    `tf.distribute.InputContext`, which functions that make datasets can take, has the number of ranks and this rank.

    Args:
      device: must be "/cpu:0".
    Raises:
      ValueError: another device is given.
    Ranks: local.
    """

    def __init__(self, device="/cpu:0"):
        if device != "/cpu:0":
            raise ValueError(
                message("NPUStrategy", "device is not supported", "'/cpu:0'", shown(device), "Leave it out.")
            )
        super().__init__(device)

    @property
    def num_replicas_in_sync(self) -> int:
        """The number of ranks: every step trains on one batch of each rank. Inside a replica, the number is 1."""
        replica = tf.distribute.get_replica_context()
        return 1 if replica is not None and replica.strategy is self else collective.current().size

    def experimental_distribute_dataset(self, dataset: tf.data.Dataset, options: Any = None) -> tf.data.Dataset:
        """Returns the shard of a dataset for this rank: `dataset.shard(number of ranks, rank)`.

        Keras has already counted the steps of an epoch when it calls this method, so it gets the dataset itself.

        Args:
          dataset: the whole dataset. If its elements are batches, they keep their size.
          options: accepted for compatibility.
        """
        del options
        ranks = collective.current()
        return dataset if is_called_by_keras() else dataset.shard(ranks.size, ranks.rank)

    def distribute_datasets_from_function(self, dataset_fn: Callable, options: Any = None) -> Any:
        """Returns the dataset that `dataset_fn` makes for this rank; its context has a pipeline for each rank."""
        return super().distribute_datasets_from_function(lambda _: dataset_fn(_context_of_rank()), options)

    def make_input_fn_iterator(self, input_fn: Callable, *arguments: Any, **keywords: Any) -> Any:
        """Returns an iterator for a TF 1 graph; its context is as in `distribute_datasets_from_function`.

        When an Estimator evaluates, there is only one pipeline, because each rank evaluates all rows.
        """
        if wire_names.current_collectives_label() == wire_names.UNTRAINED:
            return super().make_input_fn_iterator(input_fn, *arguments, **keywords)
        return super().make_input_fn_iterator(lambda _: input_fn(_context_of_rank()), *arguments, **keywords)


def _context_of_rank():
    ranks = collective.current()
    return tf.distribute.InputContext(ranks.size, ranks.rank, ranks.size)
