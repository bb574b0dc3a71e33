"""Provides a Keras callback that broadcasts variables, and the function that adds it to a script's callbacks."""

from npu_bridge.estimator.npu.npu_callbacks import NPUBroadcastGlobalVariablesCallback
from npu_bridge.estimator.npu.npu_helpers import npu_callbacks_append

__all__ = ["NPUBroadcastGlobalVariablesCallback", "npu_callbacks_append"]
