"""The training interface of Ascend NPUs for TensorFlow, on stock TensorFlow and Horovod.

Scripts start with `from npu_bridge.npu_init import *`. Importing this package alone loads nothing; its documented names
are imported on first use. `base/tensorflow_start.py` watches TensorFlow and does not load it. Only if the process has
loaded it already, sessions read the options in their settings from then on: some scripts fill in an `NpuOptimizer`
entry and import nothing else.
"""

import importlib
import sys

from npu_bridge.base import documented_paths, tensorflow_start
from npu_bridge.base.lazy import attributes, submodules
from npu_bridge.base.version import __version__

__all__ = ["__version__", "hccl_ops", "helper", "npu_bridge_handle", "npu_close", "npu_estimator"]

# Scripts may look at it; it stands for a library that is loaded elsewhere.
npu_bridge_handle = object()

__getattr__ = attributes(
    __name__,
    {
        **submodules(__name__, "boost", "estimator", "hccl", "npu_init", "tf_adapter", *documented_paths.NAMES),
        "hccl_ops": "npu_bridge.hccl.hccl_ops",
        "npu_close": "npu_bridge.estimator.npu.npu_plugin:npu_close",
        "npu_estimator": "npu_bridge.estimator.npu.npu_estimator",
    },
)

documented_paths.let_find_documented_paths()
tensorflow_start.watch()
if "tensorflow" in sys.modules:
    importlib.import_module("npu_bridge.estimator")
