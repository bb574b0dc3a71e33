"""Prints every module of the package with the first sentence of its docstring.

    python tools/module_list.py

A reader who knows TensorFlow and Horovod should understand from that sentence alone what a module does.
"""

from __future__ import annotations

import ast
import pathlib

REPOSITORY = pathlib.Path(__file__).resolve().parent.parent
PACKAGES = ("npu_bridge", "npu_run", "hccl", "npu_device", "tensorflow1_compat")


def sentences() -> dict[str, str]:
    """Returns a dict from path to first sentence of a module; each folder's `__init__.py` comes before its modules."""
    found = {}
    for package in PACKAGES:
        for folder in sorted({path.parent for path in (REPOSITORY / package).rglob("*.py")}):
            for path in sorted(folder.glob("*.py"), key=lambda path: (path.name != "__init__.py", path.name)):
                found[path.relative_to(REPOSITORY).as_posix()] = first_sentence(path)
    return found


def first_sentence(path: pathlib.Path) -> str:
    """Returns the first sentence of a module's docstring on one line."""
    paragraph = (ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) or "").split("\n\n")[0]
    text = " ".join(paragraph.split())
    sentence, end, _ = text.partition(". ")
    return sentence + end.strip()


def text() -> str:
    """Returns the list to print: a heading for each folder, a line for each module."""
    lines, folder = [], None
    for path, sentence in sentences().items():
        parent, _, name = path.rpartition("/")
        if parent != folder:
            lines += ["", f"{parent}/"] if lines else [f"{parent}/"]
            folder = parent
        lines.append(f"  {name}: {sentence}")
    return "\n".join(lines)


if __name__ == "__main__":
    print(text())
