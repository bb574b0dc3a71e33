"""Options that look into a run: dumps, profiling, debugging aids."""

from __future__ import annotations

import functools

from npu_bridge.options.kinds import Boolean, Integer, Text
from npu_bridge.options.table import DUMP, PROFILING, Option, recorded, works

_NO_KERNEL_FILES = recorded("No kernel files are made.")
_NO_DUMP = recorded("Nothing is dumped.")
_PROFILE = works("The first 20 session runs are traced. The trace in the output directory is for TensorBoard.")
_profiling = functools.partial(Option, owner=PROFILING)
_dump = functools.partial(Option, owner=DUMP)

OPTIONS = (
    Option(
        26,
        "op_debug_level",
        Integer(0, 4, enforced=False),
        "Level of kernel debug files.",
        _NO_KERNEL_FILES,
        attribute="op_debug_level",
        status="deprecated",
        replaced_by="op_debug_config",
    ),
    Option(
        28,
        "enable_exception_dump",
        Integer(0, 2),
        "Dump the data of an operator that fails. 0: off. 1: full. 2: brief.",
        _NO_DUMP,
        default=2,
        attribute="enable_exception_dump",
    ),
    Option(41, "debug_dir", Text(says="a path"), "Directory for kernel debug files.", _NO_KERNEL_FILES),
    Option(
        61,
        "op_debug_config",
        Text(says="the path of a .cfg file"),
        "File that configures memory checks and debugging of kernels.",
        _NO_KERNEL_FILES,
    ),
    Option(
        76,
        "quant_dumpable",
        Text(("0", "1"), enforced=False),
        "1: keep the tensors from before quantisation, so that they can be dumped.",
        _NO_DUMP,
    ),
    _profiling(
        1,
        "enable_profiling",
        Boolean(),
        "Profile the run.",
        _PROFILE,
        default=False,
        key="profiling_mode",
        variable="PROFILING_MODE",
    ),
    _profiling(
        2,
        "profiling_options",
        Text(says="a JSON object in a string"),
        "What to record and where to write it. Used only if profiling is on.",
        _PROFILE,
        needs="enable_profiling",
        variable="PROFILING_OPTIONS",
    ),
    _dump(
        1,
        "enable_dump",
        Boolean(),
        "Dump the tensors of operators. Needs dump_path. Cannot be combined with enable_dump_debug.",
        works("Each step has .npy files and an index.json."),
        default=False,
        sent_without_helper=True,
    ),
    _dump(
        2,
        "dump_path",
        Text(says="an existing directory"),
        "Root directory of the dump.",
        works("Files go to <time>/<rank>/<graph name>/<graph number>/<step>/ below it."),
    ),
    _dump(
        3,
        "dump_step",
        Text(says="steps and ranges such as 0|5|10-20, at most 100"),
        "Steps to dump. If it is not set: all steps.",
        works("Each session counts from 0, separately for each set of variables that a run changes."),
    ),
    _dump(
        4,
        "dump_mode",
        Text(says="'input' or 'output' or 'all'"),
        "Dump the inputs or the outputs of operators, or both.",
        works(),
        default="output",
        accepts_none=True,
    ),
    _dump(
        5,
        "enable_dump_debug",
        Boolean(),
        "Detect overflow. Needs dump_path. Cannot be combined with enable_dump.",
        works("It names the operator with the first NaN or Inf of a step, and dumps its tensors."),
        default=False,
        sent_without_helper=True,
    ),
    _dump(
        6,
        "dump_debug_mode",
        Text(says="'aicore_overflow' or 'atomic_overflow' or 'all'"),
        "Type of overflow to detect.",
        recorded("Every value works like 'all'."),
        default="all",
        accepts_none=True,
    ),
    _dump(
        7,
        "dump_data",
        Text(("tensor", "stats")),
        "Dump complete tensors, or statistics of them.",
        works("Statistics are CSV files."),
        default="tensor",
        attribute="dump_data",
        accepts_none=True,
    ),
    _dump(
        8,
        "dump_layer",
        Text(says="operator names separated by spaces"),
        "Operators to dump. If it is not set: all operators.",
        works(),
        attribute="dump_layer",
    ),
)
