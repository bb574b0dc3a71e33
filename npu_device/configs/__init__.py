"""Holds the options of `npu_device`: `global_options()` for a process, and a scope for options of single functions."""

from npu_bridge.base.lazy import lazy_getattr, places_of_submodules

__all__ = ["NpuConfig", "global_options", "npu_config", "run_context", "run_context_options"]

__getattr__ = lazy_getattr(
    __name__,
    {
        **places_of_submodules(__name__, "npu_config", "run_context"),
        "NpuConfig": "npu_device.configs.npu_config:NpuConfig",
        "global_options": "npu_device.configs.npu_config:global_options",
        "run_context_options": "npu_device.configs.run_context:RunContextOptions",
    },
)
