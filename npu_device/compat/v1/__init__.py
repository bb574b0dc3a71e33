"""Provides `npu_bridge` under another name: `npu_device.compat.v1.x` is the module `npu_bridge.x`, for every x."""

from npu_bridge.base.lazy import lazy_getattr
from npu_bridge.base.same_modules import enable_second_names

__all__ = ["SessionConfigBuilder", "estimator", "hccl", "npu_init"]

enable_second_names(__name__, "npu_bridge")
__getattr__ = lazy_getattr(
    __name__,
    {
        "SessionConfigBuilder": "npu_device.compat.v1._session_config:SessionConfigBuilder",
        **{name: f"npu_bridge.{name}" for name in ("estimator", "hccl", "npu_init")},
    },
)
