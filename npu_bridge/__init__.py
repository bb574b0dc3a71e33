"""Provides the training interface of Ascend NPUs on stock TensorFlow and Horovod.

Scripts start with `from npu_bridge.npu_init import *`. Importing this package alone loads nothing; its documented names
are imported on first use. `base/tensorflow_start.py` prepares TensorFlow and does not load it. If the process has
already loaded TensorFlow, importing this package makes sessions read the options in their ConfigProto: some scripts
only fill in an `NpuOptimizer` entry and import nothing else.
"""

import importlib
import sys

from npu_bridge.base import documented_paths, tensorflow_start
from npu_bridge.base.lazy import lazy_getattr, places_of_submodules
from npu_bridge.base.version import __version__

__all__ = ["__version__", "hccl_ops", "helper", "npu_bridge_handle", "npu_close", "npu_estimator"]

# On NPUs this is a loaded library. Scripts only refer to the name.
npu_bridge_handle = object()

__getattr__ = lazy_getattr(
    __name__,
    {
        **places_of_submodules(
            __name__, "boost", "estimator", "hccl", "npu_init", "tf_adapter", *documented_paths.NAMES
        ),
        "hccl_ops": "npu_bridge.hccl.hccl_ops",
        "npu_close": "npu_bridge.estimator.npu.npu_plugin:npu_close",
        "npu_estimator": "npu_bridge.estimator.npu.npu_estimator",
    },
)

documented_paths.enable_documented_paths()
tensorflow_start.prepare_tensorflow()
if "tensorflow" in sys.modules:
    importlib.import_module("npu_bridge.estimator")
