"""Generates `docs/options.md` and the pages beside it from the option table.

python tools/options_pages.py docs/options.md
"""

from __future__ import annotations

import pathlib
import sys
from collections.abc import Iterable
from typing import NamedTuple

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent.parent))

from npu_bridge.options import (  # noqa: E402
    table_compiler,
    table_device,
    table_observation,
    table_precision,
    table_training,  # noqa: E402
)
from npu_bridge.options.environment_table import VARIABLES, EnvironmentVariable  # noqa: E402
from npu_bridge.options.table import REQUIRED, RUN_CONFIG, SESSION, Option  # noqa: E402

_INTRODUCTION = """# Options

Look up here the effect of an option, and the place to set it:

```
npu-run -np 2 --set iterations_per_loop=10 --set precision_mode_v2=origin train.py
```

[Options that work](options_working.md) do here what their documentation says.
[Options without an effect](options_recorded.md) are checked and kept (**recorded**), or are an error with any value but
the default (**refused**). The table counts options of `NPURunConfig` and of sessions. `npu-run effects train.py` lists
those of your script.

{index}

## Where to set an option

| your script has | write |
| --- | --- |
| an Estimator | `NPURunConfig(iterations_per_loop=10)` |
| settings in a file | `NPURunConfig.from_file("run.toml")`, with the lines of the file as `iterations_per_loop = 10` |
| a session | an entry `NpuOptimizer` in the ConfigProto: [session.md](session.md#tfsession) shows one |
| an `NPURunConfig` that you do not want to edit | `npu-run --set NAME=VALUE train.py`: [below](#from-the-shell) |

Some options belong to a helper object: `dump_mode` *of DumpConfig* is set by
`NPURunConfig(dump_config=DumpConfig(dump_mode="all"))`. The classes are in `npu_bridge.estimator.npu.npu_config`.

In a session, each option has a slot for its type: `.s` for text, `.i` for an integer, `.b` for a boolean. So you write
`parameter_map["iterations_per_loop"].i = 10`. The tables show the slot, and the key if it is not the option's name. An
option without a slot cannot be set in a session.

In the column *values*, the default follows the semicolon; without one it is None. A value outside limits marked
*(advice)* draws a warning only. *Undocumented* means that the documentation of the NPU stack lacks the option.

## From the shell

`--set NAME=VALUE` changes an option of every `NPURunConfig` that the script makes, on every rank, and wins over the
script. `npu-run` checks it before it starts anything. `try`, `record`, `replay` and `bisect` take `--set`, too. One
line says where the option was used:

```text
npu-run: the NPURunConfig of train.py:12 takes --set save_checkpoints_steps=7 --set precision_mode_v2=origin
```

- NAME and VALUE are written as in a file, but a text needs no quotes: `--set dump_config.dump_mode=all`.
- A file and `--set` cannot say `None`.
- If the script makes no `NPURunConfig`, nothing changes, and a line at the end of the run says so.

## To use them again

A training that makes a [report](reporting.md) also writes `run.toml` beside it, with the options that were changed.
`NPURunConfig.from_file("out/run/run.toml")` makes the same configuration again. A comment names what a file cannot
hold, such as `session_config`. With a plain `tf.estimator.Estimator`, use `ReportHook(folder, config=config)` to get
all options.

## When options are read

- Values, and the files of `modify_mixlist` and `customize_dtypes`, are checked when you make the object or the session.
- An unknown keyword of `NPURunConfig`, or key of a file, is an error. A session leaves out an unknown key, or a value
  in a wrong slot that means nothing there, with a warning: scripts carry keys of newer NPU stacks.
- Sessions, also those of `tf.estimator.Estimator` and `MonitoredTrainingSession`, read their entry after an import of
  `npu_bridge.npu_init`, or of a name which needs TensorFlow from a package of `npu_bridge`. The ConfigProto itself
  never changes.
- Without an entry, a session is a plain session of TensorFlow. After the import of `npu_bridge.npu_init` it has soft
  placement, so `tf.device("/gpu:0")` runs everywhere, and environment variables choose its GPU and profile it.

These pages are generated from the option table by `python tools/options_pages.py docs/options.md`. Do not
edit them.
"""
_SUBJECTS = {
    "Training and ranks": table_training.OPTIONS,
    "Precision": table_precision.OPTIONS,
    "Dumps and profiles": table_observation.OPTIONS,
    "Compiler": table_compiler.OPTIONS,
    "Devices and sessions": table_device.OPTIONS,
    "Environment variables": VARIABLES,
}
_OPTION_HEADER = ("option", "values", "meaning", "effect here")
_VARIABLE_HEADER = ("variable", "meaning", "effect here")


class Page(NamedTuple):
    """One page beside `options.md`.

    Attributes:
      file: file name of the page.
      title: heading of the page.
      levels: the page lists the options and variables that have one of these effects.
    """

    file: str
    title: str
    levels: tuple[str, ...]

    @property
    def sections(self) -> dict[str, list[Option | EnvironmentVariable]]:
        """Dict from subject to the options and variables of this page."""
        found = {
            subject: [entry for entry in entries if entry.effect.level in self.levels]
            for subject, entries in _SUBJECTS.items()
        }
        return {subject: entries for subject, entries in found.items() if entries}


PAGES = (
    Page("options_working.md", "Options that work", ("works",)),
    Page("options_recorded.md", "Options without an effect", ("recorded", "refused")),
)


def render() -> dict[str, str]:
    """Returns every page as Markdown, by the name of its file."""
    index = table(("subject", *(page.title.lower() for page in PAGES)), map(_counts, _SUBJECTS))
    return {
        "options.md": _INTRODUCTION.format(index=index.rstrip()),
        **{page.file: _render_page(page) for page in PAGES},
    }


def row(entry: Option | EnvironmentVariable) -> tuple[str, ...]:
    """Returns the cells of one option or variable."""
    effect = f"**{entry.effect.level}** {entry.effect.note}".strip()
    if isinstance(entry, EnvironmentVariable):
        return f"`{entry.name}`", entry.doc + ("" if entry.is_documented else " *Undocumented.*"), effect
    values = entry.expected + ("" if getattr(entry.kind, "enforced", True) else " (advice)")
    if entry.default is not None:
        values += "; *required*" if entry.default is REQUIRED else f"; `{entry.default!r}`"
    status = "" if entry.status == "documented" else f" *{entry.status.capitalize()}.*"
    if entry.replaced_by:
        status += f" Use `{entry.replaced_by}`."
    owner = {RUN_CONFIG: "", SESSION: " *session only*"}.get(entry.owner, f" *of {entry.owner}*")
    key = entry.key if entry.key != entry.name else ""
    slot = f" `{key}.{entry.kind.session_field}`" if entry.key else ""
    return f"`{entry.name}`{owner}{slot}", values, entry.doc + status, effect


def table(header: tuple[str, ...], rows: Iterable[tuple[str, ...]]) -> str:
    """Returns a table in Markdown."""
    lines = [header, ("---",) * len(header), *rows]
    return "".join("| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |\n" for line in lines)


def _render_page(page: Page) -> str:
    parts = [f"# {page.title}\n\n[Options](options.md) explains the columns.\n"]
    for subject, entries in page.sections.items():
        header = _VARIABLE_HEADER if isinstance(entries[0], EnvironmentVariable) else _OPTION_HEADER
        parts.append(f"## {subject}\n\n{table(header, map(row, entries))}")
    return "\n".join(parts)


def _counts(subject: str) -> tuple[str, ...]:
    counts = ((page.file, len(page.sections.get(subject, ()))) for page in PAGES)
    anchor = subject.lower().replace(" ", "-")
    return subject, *(f"[{count}]({file}#{anchor})" if count else "0" for file, count in counts)


if __name__ == "__main__":
    if len(sys.argv) > 1:
        for name, text in render().items():
            pathlib.Path(sys.argv[1]).with_name(name).write_text(text, encoding="utf-8")
    else:
        print("\n".join(render().values()))
