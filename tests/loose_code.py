"""Code that no import reaches: the Python pieces of a page, and files that are in no package."""

from __future__ import annotations

import importlib.util
import pathlib
import re
import types

REPOSITORY = pathlib.Path(__file__).resolve().parent.parent


def cut_pieces(page: str) -> list[types.CodeType]:
    """The Python pieces of a page, such as `docs/boost.md`, in their order."""
    texts = re.findall(r"```python\n(.*?)```", (REPOSITORY / page).read_text(encoding="utf-8"), re.DOTALL)
    return [compile(text, f"piece {number} of {page}", "exec") for number, text in enumerate(texts)]


def run_pieces_of(page: str) -> int:
    """Runs the pieces of a page one by one, each as a module of its own; gives their number."""
    pieces = cut_pieces(page)
    for piece in pieces:
        exec(piece, {"__name__": "page"})
    return len(pieces)


def module_at(path: str) -> types.ModuleType:
    """The module of a file, such as `tools/module_list.py`."""
    file = REPOSITORY / path
    spec = importlib.util.spec_from_file_location(file.stem, file)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
