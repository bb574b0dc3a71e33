"""Defines `NPUStrategy`: the distribution strategy of one device per process."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import tensorflow as tf

from npu_bridge import collective
from npu_bridge.base.errors import message, shown

__all__ = ["NPUStrategy"]


class NPUStrategy(tf.compat.v1.distribute.OneDeviceStrategy):
    """One replica in each rank; exchanges between ranks are left to a distributed optimizer.

    Pass it as `RunConfig(train_distribute=NPUStrategy())` or use its `scope()`. It shards data, but reduces
    no gradient: wrap the optimizer with `npu_distributed_optimizer_wrapper`. As the wrapper averages, an Estimator does
    not divide the loss by the number of replicas, which it does for strategies that add gradients up.

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
        """The number of ranks: a batch of every rank makes one step."""
        return collective.current().size

    def experimental_distribute_dataset(self, dataset: tf.data.Dataset, options: Any = None) -> tf.data.Dataset:
        """Returns the part of a dataset that this rank trains on: every size-th element, beginning with its own number.

        Args:
          dataset: the whole dataset; its batches are not changed.
          options: accepted for compatibility.
        """
        del options
        ranks = collective.current()
        return dataset.shard(ranks.size, ranks.rank)

    @contextlib.contextmanager
    def _scale_loss_for_estimator_enabled(self) -> Iterator[None]:
        yield
