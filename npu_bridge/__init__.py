"""The training interface of Ascend NPUs for TensorFlow, on stock TensorFlow and Horovod.

Scripts start with `from npu_bridge.npu_init import *`. Importing this package alone does nothing.
"""

from npu_bridge._version import __version__

__all__ = ["__version__"]
