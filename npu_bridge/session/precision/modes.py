"""Translates `precision_mode` and `precision_mode_v2` into a policy; the lists of operators are in `rewriter.py`."""

from __future__ import annotations

from typing import NamedTuple

from npu_bridge.options import TrainingOptions

FLOAT16 = "float16"
BFLOAT16 = "bfloat16"
_IMITATED = ", imitated"


class Policy(NamedTuple):
    """A rule for which operators of a float32 graph compute in a lower precision, and in which dtype.

    Variables, and the operators that update them, keep their own dtype under every policy.

    Attributes:
      reach: the operators in the low dtype. "nothing": no operators. "mixed": the operators that TensorFlow's lists for
        mixed precision allow, and those that follow them. "matrix": only matrix products and convolutions; sums stay
        float32, results are rounded to the low dtype and back. "all": every operator with a kernel in the low dtype.
      low_dtype: "float16" or "bfloat16"; None if `reach` is "nothing".
      is_imitated: whether operators compute in float32, with inputs and outputs rounded to the low dtype.
    """

    reach: str
    low_dtype: str | None
    is_imitated: bool = False

    @property
    def dtype_description(self) -> str:
        """A description of the dtype: "float32", "bfloat16" or "bfloat16, imitated", for example."""
        return f"{self.low_dtype or 'float32'}{_IMITATED if self.is_imitated else ''}"

    def __str__(self) -> str:
        words = {
            "nothing": "the dtypes of the graph",
            "mixed": f"mixed {self.low_dtype}",
            "matrix": f"{self.low_dtype} in matrix operators",
            "all": f"{self.low_dtype} in all operators that have it",
        }[self.reach]
        return f"{words}{_IMITATED}" if self.is_imitated else words


ORIGINAL = Policy("nothing", None)
_POLICIES = {
    None: ORIGINAL,
    "must_keep_origin_dtype": ORIGINAL,
    "allow_fp32_to_bf16": ORIGINAL,  # lowers only operators without a float32 kernel, and TensorFlow has all of these
    "allow_fp32_to_fp16": Policy("matrix", FLOAT16),
    "force_fp16": Policy("all", FLOAT16),
    "force_fp32": Policy("matrix", FLOAT16),  # the old, misleading name of cube_fp16in_fp32out
    "cube_fp16in_fp32out": Policy("matrix", FLOAT16),
    "allow_mix_precision": Policy("mixed", FLOAT16),
    "allow_mix_precision_fp16": Policy("mixed", FLOAT16),
    "allow_mix_precision_bf16": Policy("mixed", BFLOAT16),
    "origin": ORIGINAL,
    "fp16": Policy("all", FLOAT16),
    "mixed_float16": Policy("mixed", FLOAT16),
    "mixed_bfloat16": Policy("mixed", BFLOAT16),
}
# Modes that permit a lower precision but do not ask for it.
_PERMISSIONS = ("allow_fp32_to_fp16",)


def configured_mode(options: TrainingOptions) -> str | None:
    """Returns the value of `precision_mode_v2` or `precision_mode`; None if neither option is set."""
    return options.precision_mode_v2 or options.precision_mode


def configured_policy(options: TrainingOptions, gains_from_float16: bool) -> Policy:
    """Returns the policy of the configured mode.

    A mode that only permits float16 uses float16 only on a device that computes faster in float16.
    """
    mode = configured_mode(options)
    if mode in _PERMISSIONS and not gains_from_float16:
        return ORIGINAL
    return _POLICIES[mode]


def only_permits_float16(options: TrainingOptions) -> bool:
    """Returns whether the configured mode permits a lower precision without requiring it."""
    return configured_mode(options) in _PERMISSIONS
