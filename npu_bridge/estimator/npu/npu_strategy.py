"""`NPUStrategy`: the distribution strategy of one device per process."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import tensorflow as tf

from npu_bridge import collective
from npu_bridge.base.errors import message, shown

__all__ = ["NPUStrategy"]


class NPUStrategy(tf.compat.v1.distribute.OneDeviceStrategy):
    """One replica in each rank; what ranks exchange is left to a distributed optimizer.

    It goes into `RunConfig(train_distribute=NPUStrategy())` or is used by its `scope()`. It shards data, but reduces
    no gradient: wrap the optimizer with `npu_distributed_optimizer_wrapper`. As that one averages, an Estimator does
    not divide the loss by the number of replicas, which it does for strategies that add gradients up.

    Args:
      device: "/cpu:0", the only one.
    Raises:
      ValueError: another device.
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
        """The part of a dataset that this rank trains on: every size-th element, beginning with its own number.

        Args:
          dataset: the whole; its batches stay as they are.
          options: accepted for compatibility.
        """
        del options
        ranks = collective.current()
        return dataset.shard(ranks.size, ranks.rank)

    @contextlib.contextmanager
    def _scale_loss_for_estimator_enabled(self) -> Iterator[None]:
        yield
