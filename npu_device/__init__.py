"""Provides the TensorFlow 2 and Keras interface of NPUs on stock TensorFlow and Horovod: `import npu_device as npu`.

`npu.global_options()` holds the options; `npu.open().as_default()` applies the options to this process and starts the
communication between ranks; `npu.distribute` exchanges values between ranks. The package imports its parts at their
first use. Importing the package has no side effect, with one exception: if a script uses names of an earlier
TensorFlow 2, its modules get these names.
"""

from npu_bridge.base.lazy import lazy_getattr, places_of_submodules
from npu_bridge.base.version import __version__
from tensorflow1_compat.plain import fix_old_names

_PLACES = {
    **places_of_submodules(__name__, "compat", "configs", "distribute", "npu_device", "ops", "train"),
    "gen_npu_ops": "npu_device.npu_device:gen_npu_ops",
    "global_options": "npu_device.configs.npu_config:global_options",
    "is_inf_nan_enabled": "npu_bridge.estimator.npu.npu_plugin:is_inf_nan_enabled",
    "keep_dtype_scope": "npu_bridge.estimator.npu.npu_scope:keep_dtype_scope",
    "npu_compat_function": "npu_device.npu_device:npu_compat_function",
    "npu_recompute_scope": "npu_bridge.estimator.npu.npu_scope:npu_recompute_scope",
    "npu_run_context": "npu_device.configs.run_context:npu_run_context",
    "open": "npu_device.npu_device:open",
    "set_device_sat_mode": "npu_bridge.estimator.npu.npu_plugin:set_device_sat_mode",
    "set_npu_loop_size": "npu_device.npu_device:set_npu_loop_size",
}

__all__ = ["__version__", *sorted(_PLACES)]
__getattr__ = lazy_getattr(__name__, _PLACES)

fix_old_names()


def __dir__():
    return sorted({*globals(), *__all__})
