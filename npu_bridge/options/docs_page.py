"""Generates the page `docs/options.md`: `python -m npu_bridge.options.docs_page docs/options.md`."""

from __future__ import annotations

import pathlib
import sys
from collections.abc import Iterable

from npu_bridge.options.catalogue import OPTIONS
from npu_bridge.options.environment_table import VARIABLES, Variable
from npu_bridge.options.table import (
    DUMP,
    DYNAMIC_INPUT,
    EXPERIMENTAL,
    GRAPH_MEMORY,
    MEMORY,
    PROFILING,
    REQUIRED,
    RUN_CONFIG,
    SESSION,
    Option,
    OptionTable,
)

_OWNERS = (RUN_CONFIG, PROFILING, DUMP, MEMORY, DYNAMIC_INPUT, EXPERIMENTAL, GRAPH_MEMORY, SESSION)
_INTRODUCTION = """# Options

Generated from the option table by `python -m npu_bridge.options.docs_page docs/options.md`; do not edit.

An option can be given to `NPURunConfig` (or to the helper object it belongs to, as `DumpConfig`; all of them are in
`npu_bridge.estimator.npu.npu_config`), in a TOML file read by `NPURunConfig.from_file`, or in a session: the entry
named `NpuOptimizer` of `config.graph_options.rewrite_options.custom_optimizers` holds a `parameter_map` from session
key to a value in the slot shown (`.s` text, `.i` integer, `.b` boolean). All ways are checked alike and mean the same.

Sessions read such an entry once `npu_bridge.npu_init`, or anything from `npu_bridge.estimator`, is imported;
`tf.estimator.Estimator` and `MonitoredTrainingSession` make sessions too. The ConfigProto itself is never changed.
`NPUEstimator` acts on the options by itself. A session without an entry is what it is without this package, but for
soft placement: after the import of `npu_bridge.npu_init` every session has it, so that `tf.device("/gpu:0")` runs
everywhere.

Values are checked when the object, or the session, is made; the files of `modify_mixlist` and `customize_dtypes` are
read then, too. A key of a session that no option has is left out with a warning, as scripts carry keys of newer stacks,
and so is a value in a wrong slot that means nothing there. Unknown keywords of `NPURunConfig` and unknown keys of a
file are errors.

*Effect here* is **works**, **recorded** (checked and kept; a value other than the default is mentioned once
in the log of rank 0) or **refused** (an error). A default of *none* means the option is not set. Limits
marked *(advice)* draw a warning only.
"""


def render(table: OptionTable = OPTIONS) -> str:
    """The whole page as Markdown."""
    parts = [_INTRODUCTION]
    header = ("#", "name", "session key", "allowed", "default", "meaning", "effect here")
    for owner in _OWNERS:
        heading = "Session only" if owner == SESSION else f"`{owner}`"
        parts.append(f"## {heading}\n\n{_rows(header, map(_option_cells, table.of(owner)))}")
    header = ("name", "documented", "meaning", "effect here")
    parts.append(f"## Environment variables\n\n{_rows(header, map(_variable_cells, VARIABLES))}")
    return "\n".join(parts)


def _option_cells(option: Option) -> tuple[str, ...]:
    allowed = option.expected + ("" if getattr(option.kind, "enforced", True) else " (advice)")
    status = "" if option.status == "documented" else f" *{option.status.capitalize()}.*"
    if option.replaced_by:
        status += f" Use `{option.replaced_by}`."
    default = {REQUIRED: "*required*", None: "*none*"}.get(option.default, f"`{option.default!r}`")
    return (
        str(option.position),
        f"`{option.name}`",
        f"`{option.key}` .{option.kind.session_field}" if option.key else "",
        allowed,
        default,
        option.doc + status,
        _effect(option),
    )


def _variable_cells(variable: Variable) -> tuple[str, ...]:
    return f"`{variable.name}`", "yes" if variable.is_documented else "no", variable.doc, _effect(variable)


def _effect(of: Option | Variable) -> str:
    return f"**{of.effect.level}** {of.effect.note}".strip()


def _rows(header: tuple[str, ...], rows: Iterable[tuple[str, ...]]) -> str:
    lines = [header, ("---",) * len(header), *rows]
    return "".join("| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |\n" for line in lines)


if __name__ == "__main__":
    if len(sys.argv) > 1:
        pathlib.Path(sys.argv[1]).write_text(render(), encoding="utf-8")
    else:
        print(render())
