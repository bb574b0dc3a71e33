"""Who else is training, and how tensors are summed.

`current()` answers with the one communicator of this process: `SingleProcess` when nobody else takes part (Horovod is
not imported then), `HorovodCommunicator` when a launcher started several ranks. Callers use the same few methods
either way. `group(name)` answers the same way for some of the ranks.
"""

from npu_bridge.collective.communicator import Communicator
from npu_bridge.collective.current import current
from npu_bridge.collective.groups import find as group
from npu_bridge.collective.single_process import SingleProcess

__all__ = ["Communicator", "SingleProcess", "current", "group"]
