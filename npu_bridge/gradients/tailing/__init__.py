"""Applies tail optimisation to finished graphs of Horovod and stock loss scaling: decides about overflows early.

The pass takes a graph and returns a report; it never runs a session. Where it cannot help it changes nothing, and
reports why.
"""

from npu_bridge.gradients.tailing.report import TailingReport
from npu_bridge.gradients.tailing.tailing import optimize_tail

__all__ = ["TailingReport", "optimize_tail"]
