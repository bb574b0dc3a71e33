"""Ranks and collective operations: which ranks there are, and all-reduce, all-gather and broadcast between them.

`current()` answers with the one communicator of this process: `SingleProcess` when nobody else takes part (Horovod is
not imported then), `HorovodCommunicator` when a launcher started several ranks. Callers use the same few methods
either way. `group(name)` answers the same way for some of the ranks. What only calculates (`cost_model.py`,
`fragments.py`) is used without TensorFlow, so the names are imported when they are asked for.
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
