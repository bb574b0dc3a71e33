"""Finds the ranks of a job, and runs all-reduce, all-gather and broadcast between them.

`current()` returns this process's communicator: `SingleProcess` for a process alone (without importing Horovod),
`HorovodCommunicator` if a launcher started several ranks. Both have the same few methods. `group(name)` returns the
communicator of some of the ranks. Names are imported on first use, because some modules (`cost_model.py`,
`fragments.py`) only calculate and are used without TensorFlow.
"""

from npu_bridge.base.lazy import attributes

__all__ = ["Communicator", "SingleProcess", "current", "group"]

__getattr__ = attributes(
    __name__,
    {
        "Communicator": "npu_bridge.collective.communicator:Communicator",
        "SingleProcess": "npu_bridge.collective.single_process:SingleProcess",
        "current": "npu_bridge.collective.this_process:current",
        "group": "npu_bridge.collective.groups:find",
    },
)
