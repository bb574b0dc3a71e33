"""Reading and rewriting a `tf.Graph` that others have built, before a session has seen it.

A pass takes a graph and returns a report; it never runs a session. Where it cannot help it changes nothing, and the
report says why.
"""

from npu_bridge.rewrite.loop import InGraphLoop, NotLoopableError, put_in_loop
from npu_bridge.rewrite.report import TailingReport
from npu_bridge.rewrite.tailing import free_the_tail

__all__ = ["InGraphLoop", "NotLoopableError", "TailingReport", "free_the_tail", "put_in_loop"]
