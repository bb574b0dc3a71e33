"""Mixed precision: which operator types compute in 16 bits, and switching to float32 in the middle of a training.

`Precision` holds what the options of a run ask for. `Precision.prepare` changes session settings, and `attach` (or
`PrecisionHook`, for sessions that others make) applies it to a session. TensorFlow's own rewriter does the work, and
`rewriter.py` controls it; a dtype that it cannot lower to here is imitated (`imitation.py`).
"""

from npu_bridge.session.precision.exemptions import KEEP_DTYPE, mark
from npu_bridge.session.precision.functions import lower_functions
from npu_bridge.session.precision.hook import PrecisionHook, PrecisionSummaryHook
from npu_bridge.session.precision.keras_callback import AccelerateTrainCallback
from npu_bridge.session.precision.live_session import (
    Build,
    as_last_step,
    attach,
    list_builds,
    one_decision,
    policy_of_last_step,
    precision_of_session,
)
from npu_bridge.session.precision.modes import ORIGINAL, Policy
from npu_bridge.session.precision.op_lists import (
    OpLists,
    register_float_function,
    register_half_function,
    register_promote_function,
)
from npu_bridge.session.precision.opt_level import OptLevel, from_opt_level
from npu_bridge.session.precision.policy import Precision, check_files
from npu_bridge.session.precision.switch import Switch

__all__ = [
    "AccelerateTrainCallback",
    "KEEP_DTYPE",
    "ORIGINAL",
    "Build",
    "OpLists",
    "OptLevel",
    "Policy",
    "Precision",
    "PrecisionHook",
    "PrecisionSummaryHook",
    "Switch",
    "as_last_step",
    "attach",
    "list_builds",
    "check_files",
    "from_opt_level",
    "lower_functions",
    "mark",
    "one_decision",
    "policy_of_last_step",
    "precision_of_session",
    "register_float_function",
    "register_half_function",
    "register_promote_function",
]
