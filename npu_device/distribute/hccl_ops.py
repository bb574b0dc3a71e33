"""Provides the collectives of `npu_bridge.hccl.hccl_ops` under `npu_device`."""

from npu_bridge.hccl.hccl_ops import allgather, allreduce, broadcast, receive, reduce, reduce_scatter, send

__all__ = ["allgather", "allreduce", "broadcast", "receive", "reduce", "reduce_scatter", "send"]
