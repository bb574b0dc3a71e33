"""Options of numeric precision, determinism and graph optimisation."""

from __future__ import annotations

import functools

from npu_bridge.options.kinds import Boolean, Integer, RawBytes, Text
from npu_bridge.options.table import Option, refused, works

PRECISION_MODES = (
    "must_keep_origin_dtype",
    "allow_fp32_to_fp16",
    "allow_fp32_to_bf16",
    "force_fp16",
    "force_fp32",
    "cube_fp16in_fp32out",
    "allow_mix_precision_fp16",
    "allow_mix_precision",
    "allow_mix_precision_bf16",
)
PRECISION_MODES_V2 = (
    "origin",
    "fp16",
    "cube_fp16in_fp32out",
    "mixed_float16",
    "mixed_bfloat16",
    "mixed_hif8",
    "cube_hif8",
)
# Modes that edit the lists of reducible operators, in either spelling.
MIXED_PRECISION_MODES = (
    "allow_mix_precision",
    "allow_mix_precision_fp16",
    "allow_mix_precision_bf16",
    "mixed_float16",
    "mixed_bfloat16",
    "mixed_hif8",
)
# Values that users write into one of the two options although they belong to the other, or to Keras.
_OF_V2 = {mode: f"Write precision_mode_v2={mode!r}." for mode in ("origin", "fp16", "mixed_float16", "mixed_bfloat16")}
_IN_V2 = {
    **dict.fromkeys(("float32", "fp32", "must_keep_origin_dtype"), "origin"),
    **dict.fromkeys(("bfloat16", "bf16", "allow_mix_precision_bf16"), "mixed_bfloat16"),
    **dict.fromkeys(("allow_mix_precision", "allow_mix_precision_fp16"), "mixed_float16"),
    "force_fp16": "fp16",
}
_NO_HIF8 = "The dtype hifloat8 does not exist in TensorFlow; use mixed_bfloat16 or mixed_float16."
_MODES = (
    "Operators run in float16 or bfloat16. Variables and their updates keep their own dtype. Where TensorFlow cannot "
    "lower to the dtype (float16 on a CPU, bfloat16 on a GPU or on a CPU without AVX-512), it is imitated: float32 "
    "operators on values rounded to it. cube_fp16in_fp32out accumulates in float32."
)
_IMPLEMENTATIONS = ("high_precision", "high_performance", "high_precision_for_all", "high_performance_for_all")
_undocumented = functools.partial(Option, status="undocumented")

OPTIONS = (
    Option(
        14,
        "precision_mode",
        Text(PRECISION_MODES, instead=_OF_V2),
        "Precision mode of the network, older names. Cannot be combined with precision_mode_v2.",
        works(f"{_MODES} allow_fp32_to_fp16 only permits float16; a CPU stays in float32."),
    ),
    _undocumented(
        15, "enable_reduce_precision", Boolean(), "Nothing reads it, on the NPU stack either.", default=False
    ),
    Option(
        29,
        "op_select_implmode",
        Text(_IMPLEMENTATIONS),
        "Kernel implementation: high precision or high performance.",
        status="deprecated",
        replaced_by="op_precision_mode",
    ),
    Option(
        30,
        "optypelist_for_implmode",
        Text(says="comma-separated operator types"),
        "Operator types to which op_select_implmode applies.",
        status="deprecated",
        replaced_by="op_precision_mode",
    ),
    _undocumented(37, "enable_compress_weight", Boolean(), "Compress the weights for inference.", default=False),
    _undocumented(
        38,
        "compress_weight_conf",
        Text(says="a path"),
        "File that lists the nodes to compress.",
        refused(
            "It conflicts with enable_compress_weight, which NPURunConfig always sets. A session may set it alone."
        ),
    ),
    Option(
        52,
        "modify_mixlist",
        Text(says="the path of a JSON file"),
        "File that changes the operator lists of mixed precision. Needs a mixed-precision mode.",
        works("It changes the lists of TensorFlow's mixed-precision rewriter. Use TensorFlow's operator types."),
    ),
    Option(
        53,
        "op_precision_mode",
        Text(says="the path of an INI file"),
        "File that sets the kernel precision of individual operators.",
    ),
    Option(
        60,
        "customize_dtypes",
        Text(says="the path of a text file"),
        "File that sets the dtypes of individual operators.",
        works(
            "By operator name or type: float32, or the low-precision dtype of the run. If a rule mixes dtypes, the "
            "inputs and outputs concerned are rounded, but not inside functions."
        ),
    ),
    _undocumented(
        66,
        "insert_op_file",
        RawBytes("It would change the model's inputs; put the pre-processing into the input_fn."),
        "File of operators to insert before the model inputs.",
        refused("Any content is an error: it would change the model's inputs."),
        attribute="insert_op_file",
    ),
    Option(
        70,
        "deterministic",
        Integer(0, 1, enforced=False),
        "1: operators give the same bits in every run.",
        works(
            "1: this session uses TensorFlow's deterministic kernels. A graph without a seed gets a fixed one, and so "
            "does each random operator without a seed. Other sessions are not affected."
        ),
        default=0,
    ),
    _undocumented(71, "frozen_variable", Boolean(), "Convert variables to constants for inference.", default=False),
    Option(
        74,
        "precision_mode_v2",
        Text(
            PRECISION_MODES_V2,
            refused=dict.fromkeys(("mixed_hif8", "cube_hif8"), _NO_HIF8),
            instead={word: f"Write {mode!r} here." for word, mode in _IN_V2.items()},
        ),
        "Precision mode of the network, newer names. Cannot be combined with precision_mode.",
        works(f"{_MODES} mixed_hif8 and cube_hif8 are refused."),
    ),
    Option(
        82,
        "oo_constant_folding",
        Boolean(),
        "Constant folding in the graph.",
        works("False turns it off in TensorFlow's graph optimizer."),
        default=True,
        accepts_none=True,
        strict_slot="skip",
    ),
    _undocumented(87, "oo_level", Text(), "Graph optimisation level.", default="O3", accepts_none=True),
    _undocumented(88, "optimization_switch", Text(says="pass:on;pass:off"), "Turns individual graph passes on or off."),
)
