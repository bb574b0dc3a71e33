"""The doctor's page: sections of rows, then problems; tables on a terminal, aligned text everywhere else."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import NamedTuple

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

__all__ = ["Page", "Problem", "Section", "print_page"]


class Section(NamedTuple):
    """A titled table; rows are texts of equal number."""

    title: str
    rows: Sequence[Sequence[str]]


class Problem(NamedTuple):
    """Something to mend.

    Attributes:
      what: what is wrong.
      mend: what to do.
      is_fatal: no run could work, or not the one asked about.
    """

    what: str
    mend: str = ""
    is_fatal: bool = True


@dataclasses.dataclass
class Page:
    """What the doctor has found so far."""

    sections: list[Section] = dataclasses.field(default_factory=list)
    problems: list[Problem] = dataclasses.field(default_factory=list)

    def add(self, section: Section, problems: Sequence[Problem] = ()) -> None:
        """Adds a section, unless it has no rows, and what is wrong there."""
        if section.rows:
            self.sections.append(section)
        self.problems.extend(problems)

    @property
    def exit_code(self) -> int:
        """1 when a run could not work, else 0."""
        return int(any(problem.is_fatal for problem in self.problems))

    @property
    def verdict(self) -> str:
        """One sentence."""
        fatal = sum(problem.is_fatal for problem in self.problems)
        if fatal:
            return f"A run could not work: {fatal} problem{'s' if fatal > 1 else ''} to mend."
        return "A run works here."


def print_page(page: Page, console: Console) -> None:
    """Prints a page on a console: with frames and colours on a terminal, for pasting otherwise."""
    show = _show_table if console.is_terminal else _show_text
    for section in page.sections:
        show(section, console)
    words = {True: "problem", False: "note"}
    for number, problem in enumerate(sorted(page.problems, key=lambda problem: not problem.is_fatal), start=1):
        style = "red" if problem.is_fatal else "yellow"
        console.print(Text(f"{words[problem.is_fatal]} {number}: {problem.what}", style=style), soft_wrap=True)
        if problem.mend:
            console.print(Text(f"  mend: {problem.mend}"), soft_wrap=True)
    console.print(Text(page.verdict, style="bold"), soft_wrap=True)


def _show_table(section: Section, console: Console) -> None:
    table = Table(title=section.title, title_justify="left", box=box.SIMPLE, show_header=False, title_style="bold")
    for _ in section.rows[0]:
        table.add_column(overflow="fold")
    for row in section.rows:
        table.add_row(*map(Text, row))
    console.print(table)


def _show_text(section: Section, console: Console) -> None:
    widths = [max(map(len, column)) for column in zip(*section.rows)]
    lines = [section.title]
    lines += ["  " + "  ".join(cell.ljust(width) for cell, width in zip(row, widths)).rstrip() for row in section.rows]
    console.print(Text("\n".join([*lines, ""])), soft_wrap=True)
