"""Generates `docs/options.md` and the pages beside it: `python -m npu_bridge.options.docs_page docs/options.md`."""

from __future__ import annotations

import pathlib
import sys
from collections.abc import Iterable
from typing import NamedTuple

from npu_bridge.options import table_compiler, table_device, table_observation, table_precision, table_training
from npu_bridge.options.environment_table import VARIABLES, Variable
from npu_bridge.options.table import REQUIRED, RUN_CONFIG, SESSION, Option

_INTRODUCTION = """# Options

Look here for what an option does. Each of the six pages is about one subject:

{index}

*Effect here* is one of three words. **works** means that the option does what its documentation says. **recorded**
means that the package checks and keeps the value, but nothing here depends on it. **refused** means that any value
but the default is an error. A default of *none* means that the option is not set. A value outside limits marked
*(advice)* draws a warning only.

## Where to set an option

| your script has | write |
| --- | --- |
| an Estimator | `NPURunConfig(iterations_per_loop=10)` |
| settings in a file | `NPURunConfig.from_file("run.toml")`, with the lines of the file as `iterations_per_loop = 10` |
| a session | an entry `NpuOptimizer` in the ConfigProto: [session.md](session.md#tfsession) shows one |
| an `NPURunConfig` that you do not want to edit | `npu-run --set NAME=VALUE train.py`: [below](#from-the-shell) |

Some options belong to a helper object: `dump_mode` is an argument of `DumpConfig`, and
`NPURunConfig(dump_config=DumpConfig(...))` takes the object. All of them are in
`npu_bridge.estimator.npu.npu_config`. The tables name the object below the option.

In a session, each option has a slot for its type: `.s` for text, `.i` for an integer, `.b` for a boolean. So you write
`parameter_map["iterations_per_loop"].i = 10`. The tables show the slot, and the key where it differs from the name.
An option without a slot cannot be set in a session.

## From the shell

```
npu-run -np 2 --set save_checkpoints_steps=7 --set precision_mode_v2=origin train.py
```

`--set NAME=VALUE` changes an option of every `NPURunConfig` that the script makes, on every rank. It wins over what the
script says. `npu-run` checks the name and the value before it starts anything. Then one line says where the option was
used:

```text
npu-run: the NPURunConfig of train.py:12 takes --set save_checkpoints_steps=7 --set precision_mode_v2=origin
```

- NAME is written as in a file. An option of a helper object has the helper's name in front:
  `--set dump_config.dump_mode=all`.
- VALUE is written as in a file, but a text needs no quotes. A file and `--set` cannot say `None`.
- If the script makes no `NPURunConfig`, nothing changes, and a line at the end of the run says so.
- `try`, `record`, `replay` and `bisect` take `--set`, too.

## To use them again

A training that makes a [report](reporting.md) also writes `run.toml` beside it. This file has the options that were
changed, with their values in this run. `NPURunConfig.from_file("out/run/run.toml")` makes the same configuration again.
A comment in the file names what a file cannot hold, such as `session_config`. A plain `tf.estimator.Estimator` tells
its session only a part of the options; `ReportHook(folder, config=config)` writes all of them.

## When options are read

- Values are checked when you make the object or the session. The files of `modify_mixlist` and `customize_dtypes` are
  read then, too.
- An unknown keyword of `NPURunConfig` is an error. So is an unknown key in a file.
- A session leaves out an unknown key with a warning, because scripts carry keys of newer NPU stacks. The same happens
  to a value in a wrong slot that means nothing there.
- Sessions read their entry after an import of `npu_bridge.npu_init`, or of anything from `npu_bridge.estimator`. This
  includes the sessions of `tf.estimator.Estimator` and `MonitoredTrainingSession`. The ConfigProto itself never
  changes.
- `NPUEstimator` acts on its options by itself.
- Without an entry, a session is a plain session of TensorFlow, with one difference: after the import of
  `npu_bridge.npu_init`, it has soft placement. So `tf.device("/gpu:0")` runs everywhere.

These pages are generated from the option table by `python -m npu_bridge.options.docs_page docs/options.md`. Do not
edit them.
"""


class Page(NamedTuple):
    """One page beside `options.md`.

    Attributes:
      file: its name.
      title: its heading.
      about: what its options are about, as a part of a sentence.
      entries: its options or variables.
    """

    file: str
    title: str
    about: str
    entries: tuple[Option, ...] | tuple[Variable, ...]


PAGES = (
    Page("options_training.md", "Training and ranks", "loops, checkpoints, summaries, ranks", table_training.OPTIONS),
    Page(
        "options_precision.md",
        "Precision",
        "numeric precision, determinism, optimisation of graphs",
        table_precision.OPTIONS,
    ),
    Page("options_observation.md", "Dumps and profiles", "dumps, profiles, debugging aids", table_observation.OPTIONS),
    Page("options_compiler.md", "Compiler", "compilation, its caches, tuning, dynamic shapes", table_compiler.OPTIONS),
    Page(
        "options_device.md",
        "Devices and sessions",
        "devices, memory, streams, options of sessions alone",
        table_device.OPTIONS,
    ),
    Page("options_environment.md", "Environment variables", "variables that NPU scripts set", VARIABLES),
)
_LEVELS = {"works": "Work here", "recorded": "Recorded only", "refused": "Refused"}
_OPTION_HEADER = ("option", "slot", "allowed", "default", "meaning", "effect here")
_VARIABLE_HEADER = ("variable", "documented", "meaning", "effect here")


def render() -> dict[str, str]:
    """Returns every page as Markdown, by the name of its file."""
    header = ("page", "is about", *_LEVELS)
    index = table(header, ((f"[{page.title}]({page.file})", page.about, *_counts(page)) for page in PAGES))
    return {
        "options.md": _INTRODUCTION.format(index=index.rstrip()),
        **{page.file: _render_page(page) for page in PAGES},
    }


def row(entry: Option | Variable) -> tuple[str, ...]:
    """Returns the cells of one option or variable."""
    effect = f"**{entry.effect.level}** {entry.effect.note}".strip()
    if isinstance(entry, Variable):
        return f"`{entry.name}`", "yes" if entry.is_documented else "no", entry.doc, effect
    allowed = entry.expected + ("" if getattr(entry.kind, "enforced", True) else " (advice)")
    status = "" if entry.status == "documented" else f" *{entry.status.capitalize()}.*"
    if entry.replaced_by:
        status += f" Use `{entry.replaced_by}`."
    default = {REQUIRED: "*required*", None: "*none*"}.get(entry.default, f"`{entry.default!r}`")
    owner = {RUN_CONFIG: "", SESSION: " *session only*"}.get(entry.owner, f" *of {entry.owner}*")
    key = f"`{entry.key}` " if entry.key != entry.name else ""
    slot = f"{key}.{entry.kind.session_field}" if entry.key else ""
    return f"`{entry.name}`{owner}", slot, allowed, default, entry.doc + status, effect


def table(header: tuple[str, ...], rows: Iterable[tuple[str, ...]]) -> str:
    """Returns a table in Markdown."""
    lines = [header, ("---",) * len(header), *rows]
    return "".join("| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |\n" for line in lines)


def _render_page(page: Page) -> str:
    is_variables = page.entries is VARIABLES
    parts = [f"# Options: {page.title.lower()}\n\n[Options](options.md) explains the columns.\n"]
    for level, heading in _LEVELS.items():
        if entries := [entry for entry in page.entries if entry.effect.level == level]:
            header = _VARIABLE_HEADER if is_variables else _OPTION_HEADER
            parts.append(f"## {heading}\n\n{table(header, map(row, entries))}")
    return "\n".join(parts)


def _counts(page: Page) -> tuple[str, ...]:
    levels = [entry.effect.level for entry in page.entries]
    return tuple(str(levels.count(level)) for level in _LEVELS)


if __name__ == "__main__":
    if len(sys.argv) > 1:
        for name, text in render().items():
            pathlib.Path(sys.argv[1]).with_name(name).write_text(text, encoding="utf-8")
    else:
        print("\n".join(render().values()))
