"""Applies tail optimisation to complete graphs of Horovod and stock loss scaling: checks for overflows early."""

from npu_bridge.tailing.report import TailingReport
from npu_bridge.tailing.tailing import optimize_tail

__all__ = ["TailingReport", "optimize_tail"]
