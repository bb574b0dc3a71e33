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
# What people write into one of the two options and is a value of the other, or of Keras.
_OF_V2 = {mode: f"Write precision_mode_v2={mode!r}." for mode in ("origin", "fp16", "mixed_float16", "mixed_bfloat16")}
_IN_V2 = {
    **dict.fromkeys(("float32", "fp32", "must_keep_origin_dtype"), "origin"),
    **dict.fromkeys(("bfloat16", "bf16", "allow_mix_precision_bf16"), "mixed_bfloat16"),
    **dict.fromkeys(("allow_mix_precision", "allow_mix_precision_fp16"), "mixed_float16"),
    "force_fp16": "fp16",
}
_NO_HIF8 = "The dtype hifloat8 does not exist in TensorFlow; use mixed_bfloat16 or mixed_float16."
_MODES = (
    "Matrix and other operators really run in float16 or bfloat16; variables and their updates never do. On a "
    "processor cube_fp16in_fp32out rounds what goes into a matrix operator and adds up in float32. On a GPU bfloat16 "
    "stays float32, with a warning."
)
_IMPLEMENTATIONS = ("high_precision", "high_performance", "high_precision_for_all", "high_performance_for_all")
_undocumented = functools.partial(Option, status="undocumented")

OPTIONS = (
    Option(
        14,
        "precision_mode",
        Text(PRECISION_MODES, instead=_OF_V2),
        "Network-wide precision, old names; excludes precision_mode_v2.",
        works(f"{_MODES} allow_fp32_to_fp16 is a permission: a CPU stays in float32."),
    ),
    _undocumented(
        15, "enable_reduce_precision", Boolean(), "Nothing reads it, on the NPU stack either.", default=False
    ),
    Option(
        29,
        "op_select_implmode",
        Text(_IMPLEMENTATIONS),
        "Flavour of the kernels.",
        status="deprecated",
        replaced_by="op_precision_mode",
    ),
    Option(
        30,
        "optypelist_for_implmode",
        Text(says="comma-separated operator types"),
        "Operator types op_select_implmode applies to; needs it.",
        status="deprecated",
        replaced_by="op_precision_mode",
    ),
    _undocumented(37, "enable_compress_weight", Boolean(), "Compress weights for inference.", default=False),
    _undocumented(
        38,
        "compress_weight_conf",
        Text(says="a path"),
        "File naming the nodes to compress.",
        refused("Excludes enable_compress_weight, which NPURunConfig always sends; a session may carry it alone."),
    ),
    Option(
        52,
        "modify_mixlist",
        Text(says="the path of a JSON file"),
        "File editing which operators mixed precision may reduce; needs a mixed precision mode.",
        works("Edits the lists of TensorFlow's rewriter; names are TensorFlow's operator types."),
    ),
    Option(
        53,
        "op_precision_mode",
        Text(says="the path of an INI file"),
        "File with the kernel precision of single operators.",
    ),
    Option(
        60,
        "customize_dtypes",
        Text(says="the path of a text file"),
        "File with the dtypes of single operators.",
        works(
            "By operator name or type: float32, or the one low dtype of the run. Where a rule's dtypes differ, single "
            "inputs and outputs are rounded, outside of functions."
        ),
    ),
    _undocumented(
        66,
        "insert_op_file",
        RawBytes("It would change the model's inputs; put the pre-processing into the input_fn."),
        "File of operators inserted in front of the inputs.",
        refused("Any content is an error: it would change the model's inputs."),
        attribute="insert_op_file",
    ),
    Option(
        70,
        "deterministic",
        Integer(0, 1, enforced=False),
        "1 makes operators bit-reproducible.",
        works(
            "1 runs this session with TensorFlow's deterministic kernels, and gives a graph without a seed a fixed "
            "one, each random operator without a seed one of its own. Other sessions stay as they are."
        ),
        default=0,
    ),
    _undocumented(71, "frozen_variable", Boolean(), "Fold variables to constants for inference.", default=False),
    Option(
        74,
        "precision_mode_v2",
        Text(
            PRECISION_MODES_V2,
            refused=dict.fromkeys(("mixed_hif8", "cube_hif8"), _NO_HIF8),
            instead={word: f"Write {mode!r} here." for word, mode in _IN_V2.items()},
        ),
        "Network-wide precision, new names; excludes precision_mode.",
        works(f"{_MODES} mixed_hif8 and cube_hif8 are refused."),
    ),
    Option(
        82,
        "oo_constant_folding",
        Boolean(),
        "Fold constants in the graph.",
        works("False switches it off in TensorFlow's rewriter."),
        default=True,
        accepts_none=True,
        strict_slot="skip",
    ),
    _undocumented(87, "oo_level", Text(), "Level of graph optimisation.", default="O3", accepts_none=True),
    _undocumented(88, "optimization_switch", Text(says="pass:on;pass:off"), "Switches of single graph passes."),
)
