"""Provides mixed precision by levels, and loss scales of several kinds."""

from __future__ import annotations

from npu_bridge.base import lazy

_PLACES = {
    "Configuration": "npu_bridge.amp.configuration:Configuration",
    "DynamicLossScaleManager": "npu_bridge.amp.loss_scale:DynamicLossScaleManager",
    "GroupLossScaleManager": "npu_bridge.amp.groups:GroupLossScaleManager",
    "LEVELS": "npu_bridge.session.precision.levels:LEVELS",
    "configure": "npu_bridge.amp.configuration:configure",
    "export_float32": "npu_bridge.session.precision.float32_export:export_float32",
    "float_function": "npu_bridge.amp.casts:float_function",
    "forget_functions": "npu_bridge.amp.casts:forget_functions",
    "half_function": "npu_bridge.amp.casts:half_function",
    "initialize": "npu_bridge.amp.apex:initialize",
    "load_state_dict": "npu_bridge.amp.custom_loops:load_state_dict",
    "promote_function": "npu_bridge.amp.casts:promote_function",
    "scale_boundary": "npu_bridge.amp.groups:scale_boundary",
    "scale_loss": "npu_bridge.amp.custom_loops:scale_loss",
    "state_dict": "npu_bridge.amp.custom_loops:state_dict",
    "unscaled_gradients": "npu_bridge.amp.custom_loops:unscaled_gradients",
}
_MODULES = ("apex", "casts", "configuration", "groups", "loss_scale", "scaling")

__all__ = list(_PLACES)
__getattr__ = lazy.lazy_getattr(__name__, {**_PLACES, **lazy.places_of_submodules(__name__, *_MODULES)})
