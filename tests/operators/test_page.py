"""The code of docs/operators.md runs as it stands."""

from __future__ import annotations

import pathlib
import re

PAGE = (pathlib.Path(__file__).parents[2] / "docs" / "operators.md").read_text()


def test_code_runs_as_it_stands(capsys):
    (code,) = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
    exec(compile(code, "docs/operators.md", "exec"), {})
    assert re.search(r"loss \d+\.\d+", capsys.readouterr().out)
