"""Mixed precision by levels, and loss scales of several kinds."""

from npu_bridge import _lazy

_PLACES = {
    "DynamicLossScaleManager": "npu_bridge.amp.loss_scale:DynamicLossScaleManager",
    "GroupLossScaleManager": "npu_bridge.amp.groups:GroupLossScaleManager",
    "load_state_dict": "npu_bridge.amp.scaling:load_state_dict",
    "scale_boundary": "npu_bridge.amp.groups:scale_boundary",
    "scale_loss": "npu_bridge.amp.scaling:scale_loss",
    "state_dict": "npu_bridge.amp.scaling:state_dict",
    "unscaled_gradients": "npu_bridge.amp.scaling:unscaled_gradients",
}
__all__ = list(_PLACES)
__getattr__ = _lazy.attributes(__name__, _PLACES)
