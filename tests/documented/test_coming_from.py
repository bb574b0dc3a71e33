"""The pages for users of other systems: every row has code for here, which runs unchanged.

Such a page has tables "there | here | what differs". The code in the cells "here" is run in the order of the page, in
the names that the pieces of python above the first table leave behind: each a statement, or an expression. Eager
execution stays on; a graph of TensorFlow 1 is built inside `with tf.Graph().as_default():`, or in a function.
"""

from __future__ import annotations

import pathlib
import re
from typing import NamedTuple

import pytest
import tensorflow as tf

REPOSITORY = pathlib.Path(__file__).parents[2]
# Names of the other systems that a page answers.
NAMES = {"amp": 45, "boost": 20, "from_other": 82}
PAGES = [REPOSITORY / "docs" / f"{name}.md" for name in NAMES]
HEADS = ("there", "here", "what differs")


class Row(NamedTuple):
    line: int
    there: str
    here: str
    differs: str

    @property
    def names(self):
        """The code of the first cell, or its words."""
        return re.findall(r"`([^`]+)`", self.there) or [self.there]

    @property
    def code(self):
        return [piece.replace(r"\|", "|") for piece in re.findall(r"`([^`]+)`", self.here)]


def cells_of(line):
    """Returns the cells of a line of a table; an escaped bar does not separate cells."""
    return [cell.strip() for cell in re.split(r"(?<!\\)\|", line.strip())[1:-1]]


def rows_of(text):
    """The rows of all tables with the three heads, in their order."""
    rows, is_inside, is_code = [], False, False
    for number, line in enumerate(text.splitlines(), start=1):
        is_code ^= line.startswith("```")
        if is_code or not line.startswith("|"):
            is_inside = False
        elif tuple(cells_of(line)) == HEADS:
            is_inside = True
        elif is_inside and not set(line) <= set("|-: "):
            cells = cells_of(line)
            assert len(cells) == len(HEADS), f"line {number}: expected {len(HEADS)} cells; got {len(cells)}"
            rows.append(Row(number, *cells))
    return rows


def run(text, name):
    """Runs the pieces of python above the tables, and every row of a page; returns the names they leave behind."""
    names = {"__name__": name}
    above = text.partition(f"| {' | '.join(HEADS)} |")[0]
    for piece in re.findall(r"```python\n(.*?)```", above, re.DOTALL):
        exec(compile(piece, f"the code of {name}", "exec"), names)
    for row in rows_of(text):
        for code in row.code:
            try:
                exec(compile(code, f"{name}, line {row.line}", "exec"), names)
            except Exception as error:
                said = f"{type(error).__name__}: {error}"
                raise AssertionError(f"{name}, line {row.line}: {code!r} raised {said}") from error
    return names


@pytest.fixture
def stock_tensorflow(tmp_path, monkeypatch):
    """Runs a test in a new folder; afterwards undoes the settings that a page makes in the process."""
    monkeypatch.chdir(tmp_path)
    policy = tf.keras.mixed_precision.global_policy()
    yield
    tf.keras.mixed_precision.set_global_policy(policy)
    tf.keras.backend.clear_session()


@pytest.mark.few_fast(1, "code of the other pages")
@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_code_of_every_row_runs(page, stock_tensorflow):
    run(page.read_text(encoding="utf-8"), page.name)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_every_name_has_a_row_with_code(page):
    rows = rows_of(page.read_text(encoding="utf-8"))
    assert [row.line for row in rows if not (row.there and row.code and row.differs)] == []
    assert len({name for row in rows for name in row.names}) >= NAMES[page.stem]


def test_what_is_read_and_run():
    """Tests the check itself."""
    page = "```python\nfrom math import pi\n```\n\n| there | here | what differs |\n| --- | --- | --- |\n"
    page += (
        "| two | `twice = 2 * pi`, then `big = twice \\| 8 if 0 else twice` | nothing |\n| none | in words | much |\n"
    )
    page += "\n| another | table |\n| --- | --- |\n| `1 / 0` | `1 / 0` |\n"
    assert [row.code for row in rows_of(page)] == [["twice = 2 * pi", "big = twice | 8 if 0 else twice"], []]
    assert [row.names for row in rows_of(page)] == [["two"], ["none"]]
    assert run(page, "a page")["big"] > 6
    with pytest.raises(AssertionError, match="line 7: 'twice = 2 [*] py' raised NameError"):
        run(page.replace("2 * pi", "2 * py"), "a page")
    with pytest.raises(AssertionError, match="expected 3 cells; got 2"):
        rows_of(page.replace("| in words | much |", "| in words |"))
