"""Applies tail optimisation to complete graphs of Horovod and stock loss scaling: checks for overflows early.

The pass takes a graph and returns a report; it never runs a session. If it cannot improve a graph, it leaves the graph
unchanged and reports the reason.
"""

from npu_bridge.tailing.report import TailingReport
from npu_bridge.tailing.tailing import optimize_tail

__all__ = ["TailingReport", "optimize_tail"]
