"""Provides the callback and the function with which scripts extend their Keras callbacks."""

from npu_bridge.estimator.npu.npu_callbacks import NPUBroadcastGlobalVariablesCallback
from npu_bridge.estimator.npu.npu_helpers import npu_callbacks_append

__all__ = ["NPUBroadcastGlobalVariablesCallback", "npu_callbacks_append"]
