"""Provides `npu_bridge` under another name: `npu_device.compat.v1.x` is the module `npu_bridge.x`, for every x."""

from npu_bridge.base.lazy import attributes
from npu_bridge.base.same_modules import let_find_same_modules

__all__ = ["SessionConfigBuilder", "estimator", "hccl", "npu_init"]

let_find_same_modules(__name__, "npu_bridge")
__getattr__ = attributes(
    __name__,
    {
        "SessionConfigBuilder": "npu_device.compat.v1._session_config:SessionConfigBuilder",
        **{name: f"npu_bridge.{name}" for name in ("estimator", "hccl", "npu_init")},
    },
)
