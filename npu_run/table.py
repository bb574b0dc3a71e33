"""Prints tables: with frames on a terminal, as aligned columns elsewhere, for pasting."""

from __future__ import annotations

from collections.abc import Sequence

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from npu_bridge.base.terminal import escape_controls, escape_in_line


class PlainConsole(Console):
    """A console without highlighting, which does not end the process when its output is closed."""

    def __init__(self):
        super().__init__(highlight=False)

    def on_broken_pipe(self) -> None:
        """Raises `BrokenPipeError` again; rich would end the process."""
        raise BrokenPipeError


def print_text(console: Console, text: str, style: str = "") -> None:
    """Prints lines on a console, with control characters made visible."""
    console.print(Text(escape_controls(text), style=style), soft_wrap=True)


def print_table(
    rows: Sequence[Sequence[str]],
    console: Console,
    title: str = "",
    headings: Sequence[str] = (),
    right_aligned_columns: int = 0,
) -> None:
    """Prints rows, and an empty line below them.

    Args:
      rows: at least one row; all rows have the same number of cells.
      console: the console to print on.
      title: a line above the table; the rows are then indented.
      headings: titles of the columns.
      right_aligned_columns: number of columns, counted from the left, that are aligned to the right.
    """
    if console.is_terminal:
        table = Table(title=title or None, title_justify="left", title_style="bold", box=box.SIMPLE)
        table.show_header = bool(headings)
        for number in range(len(rows[0])):
            heading = headings[number] if headings else ""
            table.add_column(heading, justify="right" if number < right_aligned_columns else "left", overflow="fold")
        for row in rows:
            table.add_row(*(Text(escape_in_line(cell)) for cell in row))
        console.print(table)
        return
    lines = [[escape_in_line(cell) for cell in line] for line in ([headings, *rows] if headings else rows)]
    widths = [max(map(len, column)) for column in zip(*lines)]
    if title:
        print_text(console, title)
    indent = "  " if title else ""
    for line in lines:
        cells = [cell.rjust(width) for cell, width in zip(line[:right_aligned_columns], widths)]
        cells += [
            cell.ljust(width) for cell, width in zip(line[right_aligned_columns:], widths[right_aligned_columns:])
        ]
        print_text(console, indent + "  ".join(cells).rstrip())
    console.print()
