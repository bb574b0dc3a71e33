"""Defines the page of `npu-run doctor`: sections with rows, then problems and their cures."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any, NamedTuple

from rich.console import Console

from npu_bridge.base.terminal import escape_in_line
from npu_run.table import print_table, print_text


class PageSection(NamedTuple):
    """A table with a title.

    Attributes:
      title: the title on the printed page.
      rows: rows of texts; all rows have the same number of texts, at least as many as `fields`.
      key: the section's name in JSON.
      fields: names of the texts of a row in JSON.
    """

    title: str
    rows: Sequence[Sequence[str]]
    key: str = ""
    fields: tuple[str, ...] = ("name", "value")


class FoundProblem(NamedTuple):
    """A problem that the doctor has found.

    Attributes:
      what: what is wrong.
      fix: how to fix it.
      is_fatal: whether runs, or the run that was asked about, could not work.
    """

    what: str
    fix: str = ""
    is_fatal: bool = True


@dataclasses.dataclass
class DoctorPage:
    """The findings of the doctor so far."""

    sections: list[PageSection] = dataclasses.field(default_factory=list)
    problems: list[FoundProblem] = dataclasses.field(default_factory=list)
    lacks_horovod: bool = False

    def add(self, section: PageSection, problems: Sequence[FoundProblem] = ()) -> None:
        """Adds a section, unless it is empty, and problems, except a problem whose text quotes an earlier problem."""
        if section.rows:
            self.sections.append(section)
        for problem in problems:
            if not any(earlier.what in problem.what for earlier in self.problems):
                self.problems.append(problem)

    def make_json_facts(self) -> dict[str, Any]:
        """Returns the page for JSON: under each section's key a list of its rows, as dicts from field to text."""
        sections = {
            each.key: [
                {name: text.removeprefix(f"{name} ") for name, text in zip(each.fields, row)} for row in each.rows
            ]
            for each in self.sections
        }
        return {**sections, "problems": [problem._asdict() for problem in self.problems]}

    @property
    def exit_code(self) -> int:
        """Exit code: 1 if a run could not work, else 0."""
        return int(any(problem.is_fatal for problem in self.problems))

    @property
    def verdict(self) -> str:
        """A sentence on whether a run works."""
        fatal = sum(problem.is_fatal for problem in self.problems)
        if fatal:
            return f"A run could not work: {fatal} problem{'s' if fatal > 1 else ''} to fix."
        return "A run works here."


def print_page(page: DoctorPage, console: Console, is_short: bool = False) -> None:
    """Prints a page: with frames and colours on a terminal, otherwise as plain text, which can be pasted.

    Args:
      page: the findings.
      console: prints the findings.
      is_short: whether to omit the sections.
    """
    for section in page.sections * (not is_short):
        print_table(section.rows, console, section.title)
    words = {True: "problem", False: "note"}
    for number, problem in enumerate(sorted(page.problems, key=lambda problem: not problem.is_fatal), start=1):
        style = "red" if problem.is_fatal else "yellow"
        print_text(console, f"{words[problem.is_fatal]} {number}: {escape_in_line(problem.what)}", style)
        if problem.fix:
            print_text(console, f"  fix: {problem.fix}")
    print_text(console, page.verdict, "bold")
