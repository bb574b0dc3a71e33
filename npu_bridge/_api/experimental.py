"""`npu_bridge.experimental` under its second name."""

from npu_bridge.experimental import *  # noqa: F403
from npu_bridge.experimental import __all__  # noqa: F401
