"""Finds the ranks of a job, and runs all-reduce, all-gather and broadcast between them.

`current()` returns this process's communicator: a `SingleProcess` for a process that trains alone, else one that uses
Horovod or TensorFlow's own collectives. All communicators have the same methods. `group(name)` returns the communicator
of some of the ranks. Names are imported on first use, because `cost_model.py` and `fragments.py` are also used without
TensorFlow.
"""

from npu_bridge.base.lazy import lazy_getattr

__all__ = ["Communicator", "SingleProcess", "current", "group"]

__getattr__ = lazy_getattr(
    __name__,
    {
        "Communicator": "npu_bridge.collective.engines.communicator:Communicator",
        "SingleProcess": "npu_bridge.collective.engines.single_process:SingleProcess",
        "current": "npu_bridge.collective.this_process:current",
        "group": "npu_bridge.collective.groups:find_group",
    },
)
