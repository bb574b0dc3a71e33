"""Supports scripts in the style of TensorFlow 1 under `npu_device`."""

from npu_bridge.base.lazy import lazy_getattr, places_of_submodules

__all__ = ["enable_v1", "v1"]

__getattr__ = lazy_getattr(__name__, places_of_submodules(__name__, "v1"))


def enable_v1() -> None:
    """Switches TensorFlow to graphs and sessions.

    Call this function before any TensorFlow operation runs, and before `from npu_device.compat.v1.npu_init import *`.

    Raises:
      ValueError: an operation of TensorFlow 2 has already run.
    """
    import tensorflow.compat.v1 as tf

    tf.disable_v2_behavior()
