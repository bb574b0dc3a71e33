"""The collectives of `npu_bridge.hccl.hccl_ops` under the name they have here."""

from npu_bridge.hccl.hccl_ops import allgather, allreduce, broadcast, receive, reduce, reduce_scatter, send

__all__ = ["allgather", "allreduce", "broadcast", "receive", "reduce", "reduce_scatter", "send"]
