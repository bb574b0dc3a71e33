"""`tf.contrib.distribute`: distribution strategies that take the arguments of TensorFlow 1.15."""

from __future__ import annotations

import collections
import logging

import tensorflow.compat.v1 as tf
from tensorflow.compat.v1.distribute import (
    ReduceOp,
    StrategyExtended,
    get_loss_reduction,
    get_replica_context,
    get_strategy,
    has_strategy,
    in_cross_replica_context,
)
from tensorflow.compat.v1.distribute import Strategy as DistributionStrategy
from tensorflow.compat.v1.distribute.experimental import CentralStorageStrategy
from tensorflow.compat.v1.distribute.experimental import ParameterServerStrategy as _ParameterServerStrategy
from tensorflow.python.distribute.cross_device_ops import AllReduceCrossDeviceOps, CrossDeviceOps

from npu_bridge.base.errors import say_once

get_distribution_strategy, has_distribution_strategy = get_strategy, has_strategy
get_cross_tower_context, get_tower_context = get_strategy, get_replica_context
OneDeviceStrategy = tf.distribute.OneDeviceStrategy
ReductionToOneDevice = ReductionToOneDeviceCrossDeviceOps = tf.distribute.ReductionToOneDevice


class MirroredStrategy(tf.distribute.MirroredStrategy):
    """A `tf.distribute.MirroredStrategy` over `devices`, or over the first `num_gpus` GPUs.

    On a machine with fewer GPUs than requested, the strategy uses the existing devices.
    """

    def __init__(
        self, devices=None, num_gpus=None, num_gpus_per_worker=None, cross_device_ops=None, auto_shard_dataset=False,
        cross_tower_ops=None,
    ):  # fmt: skip
        count = num_gpus if num_gpus is not None else num_gpus_per_worker
        if devices is None and count is not None:
            here = len(tf.config.list_physical_devices("GPU"))
            if count > here:
                say_once(logging.WARNING, f"MirroredStrategy: the script needs {count} GPUs, but {here} are available.")
            devices = [f"/gpu:{each}" for each in range(min(count, here))] or ["/cpu:0"]
        super().__init__(devices=devices, cross_device_ops=cross_device_ops or cross_tower_ops)


class CollectiveAllReduceStrategy(tf.distribute.experimental.MultiWorkerMirroredStrategy):
    """A `MultiWorkerMirroredStrategy` that takes the arguments of TensorFlow 1.15."""

    def __init__(self, num_gpus_per_worker=0, communication=None):
        super().__init__()


class ParameterServerStrategy(_ParameterServerStrategy):
    """A `tf.distribute.experimental.ParameterServerStrategy` that takes the arguments of TensorFlow 1.15."""

    def __init__(self, num_gpus_per_worker=0):
        super().__init__()


class DistributeConfig(
    collections.namedtuple("DistributeConfig", ("train_distribute", "eval_distribute", "remote_cluster"))
):
    """Strategies for training and evaluation: (train_distribute, eval_distribute, remote_cluster)."""

    def __new__(cls, train_distribute=None, eval_distribute=None, remote_cluster=None):
        return super().__new__(cls, train_distribute, eval_distribute, remote_cluster)
