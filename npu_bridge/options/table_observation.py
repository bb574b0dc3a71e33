"""Options that look into a run: dumps, profiling, debugging aids."""

from __future__ import annotations

import functools

from npu_bridge.options.kinds import Boolean, Integer, Text
from npu_bridge.options.table import DUMP, PROFILING, Option, recorded, works

_NO_KERNEL_FILES = recorded("No kernel files are made.")
_NO_DUMP = recorded("Nothing is dumped.")
_PROFILE = works("The first 20 session runs become a trace in its output directory, for TensorBoard.")
_profiling = functools.partial(Option, owner=PROFILING)
_dump = functools.partial(Option, owner=DUMP)

OPTIONS = (
    Option(
        26,
        "op_debug_level",
        Integer(0, 4, enforced=False),
        "Debug files of the kernels.",
        _NO_KERNEL_FILES,
        attribute="op_debug_level",
        status="deprecated",
        replaced_by="op_debug_config",
    ),
    Option(
        28,
        "enable_exception_dump",
        Integer(0, 2),
        "Dump the data of a failing operator: 0 off, 1 full, 2 lite.",
        _NO_DUMP,
        default=2,
        attribute="enable_exception_dump",
    ),
    Option(41, "debug_dir", Text(says="a path"), "Directory of kernel debug files.", _NO_KERNEL_FILES),
    Option(
        61,
        "op_debug_config",
        Text(says="the path of a .cfg file"),
        "File with memory and debug checks of the kernels.",
        _NO_KERNEL_FILES,
    ),
    Option(
        76,
        "quant_dumpable",
        Text(("0", "1"), enforced=False),
        "1 keeps tensors before quantisation so that they can be dumped.",
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
        "What to collect and where to write it; read only when profiling is on.",
        _PROFILE,
        needs="enable_profiling",
        variable="PROFILING_OPTIONS",
    ),
    _dump(
        1,
        "enable_dump",
        Boolean(),
        "Dump tensors of operators; excludes enable_dump_debug; needs dump_path.",
        works("Written as .npy files with an index.json for each step."),
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
        "Steps to dump; all when not set.",
        works("Counted from 0 in each session, for each set of variables it changes."),
    ),
    _dump(
        4,
        "dump_mode",
        Text(says="'input' or 'output' or 'all'"),
        "Side of the operators to dump.",
        works(),
        default="output",
        accepts_none=True,
    ),
    _dump(
        5,
        "enable_dump_debug",
        Boolean(),
        "Detect overflow; excludes enable_dump; needs dump_path.",
        works("Names the operator that made the first NaN or Inf of a step and writes its tensors."),
        default=False,
        sent_without_helper=True,
    ),
    _dump(
        6,
        "dump_debug_mode",
        Text(says="'aicore_overflow' or 'atomic_overflow' or 'all'"),
        "Class of overflow to detect.",
        recorded("Every value behaves as 'all'."),
        default="all",
        accepts_none=True,
    ),
    _dump(
        7,
        "dump_data",
        Text(("tensor", "stats")),
        "Dump whole tensors or their statistics.",
        works("Statistics are CSV files."),
        default="tensor",
        attribute="dump_data",
        accepts_none=True,
    ),
    _dump(
        8,
        "dump_layer",
        Text(says="operator names separated by spaces"),
        "Operators to dump; all when not set.",
        works(),
        attribute="dump_layer",
    ),
)
