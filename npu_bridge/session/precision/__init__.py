"""Mixed precision: decides which operators compute in 16 bits, and can switch to float32 in the middle of a training.

A `Precision` holds the mixed precision that the options of a run ask for. `Precision.prepare` changes session settings,
and `attach_precision` applies the precision to a session; `PrecisionHook` does so for sessions that others make.
TensorFlow's own rewriter lowers the operators, controlled by `rewriter.py`. A dtype to which the rewriter cannot lower
on this machine is imitated (`imitation.py`).
"""

from npu_bridge.base.lazy import lazy_getattr

_PLACES = {
    "exemptions": ("KEEP_DTYPE", "exempt_operator"),
    "functions": ("lower_functions",),
    "hook": ("PrecisionHook", "PrecisionSummaryHook"),
    "keras_callback": ("AccelerateTrainCallback",),
    "live_session": (
        "Build",
        "with_policy_of_last_step",
        "attach_precision",
        "list_builds",
        "sharing_one_policy",
        "policy_of_last_step",
        "precision_of_session",
    ),
    "modes": ("ORIGINAL", "Policy"),
    "op_lists": ("OpLists", "register_float_function", "register_half_function", "register_promote_function"),
    "opt_level": ("OptLevel", "from_opt_level"),
    "policy": ("Precision", "check_files"),
    "switch": ("Switch",),
}

__all__ = sorted(name for names in _PLACES.values() for name in names)
__getattr__ = lazy_getattr(
    __name__, {name: f"{__name__}.{module}:{name}" for module, names in _PLACES.items() for name in names}
)
