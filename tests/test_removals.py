"""Files are removed and replaced in one module, `npu_bridge/base/files.py`, which asks whose they are."""

from __future__ import annotations

import ast

import pytest

from tests.sources import tree_of
from tests.test_floors import MODULES

THE_MODULE = "npu_bridge.base.files"
# Whatever they are called on; the others only on a module of files: lists have `remove`, and texts `replace`.
ALWAYS = {"DeleteRecursively", "Remove", "Rename", "removedirs", "renames", "rmdir", "rmtree", "unlink", "copytree"}
OF_FILES = {"remove", "replace", "rename", "move", "truncate", "link", "symlink"}
MODULES_OF_FILES = {"os", "shutil", "gfile", "file_io"}
# `os.link` fails where there is a file already.
HARMLESS = {("npu_bridge.base.held_folders", "link")}


def removals_of(tree):
    """(line, name) of what removes or replaces a file."""
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[-1] in MODULES_OF_FILES:
            yield from ((node.lineno, each.name) for each in node.names if each.name in ALWAYS | OF_FILES)
        if not isinstance(node, ast.Attribute) or node.attr not in ALWAYS | OF_FILES:
            continue
        owner = getattr(node.value, "attr", getattr(node.value, "id", ""))
        if node.attr in ALWAYS or owner in MODULES_OF_FILES:
            yield node.lineno, node.attr
    # matplotlib writes over what has a path, through links too; to an open file it adds.
    calls = [node for node in ast.walk(tree) if isinstance(node, ast.Call) and node.args]
    to_files = [node.func for node in calls if ast.unparse(node.args[0]) == "file"]
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and node.attr == "savefig" and node not in to_files:
            yield node.lineno, node.attr
    for node in ast.walk(tree):  # of a pathlib.Path: a text's `replace` takes two arguments
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and not node.keywords:
            if node.func.attr in ("replace", "rename") and len(node.args) == 1:
                if ast.unparse(node.func) != "dataclasses.replace":
                    yield node.lineno, node.func.attr


def test_only_one_module_removes_or_replaces_files():
    found = {
        (module, name, line)
        for module, path in MODULES.items()
        for line, name in removals_of(tree_of(path))
        if (module, name) not in HARMLESS
    }
    assert {name for module, name, _ in found if module == THE_MODULE} >= {"unlink", "rmdir", "replace", "rename"}
    elsewhere = sorted(each for each in found if each[0] != THE_MODULE)
    assert not elsewhere, f"{elsewhere} remove or replace files. Use npu_bridge/base/files.py."


@pytest.mark.parametrize(
    "code",
    [
        "import shutil\nshutil.rmtree(folder)",
        "import os as files\nfiles.unlink(path)",
        "from os import remove as forget\nforget(path)",
        "import os\nfor path in paths: os.remove(path)",
        "pathlib.Path(a).replace(b)",
        "path.rename(other)",
        "tf.io.gfile.rename(a, b, overwrite=True)",
        "tf.compat.v1.gfile.DeleteRecursively(folder)",
        "figure.savefig(path)",
        "functools.partial(figure.savefig, path)",
    ],
)
def test_what_removes_is_found(code):
    assert list(removals_of(ast.parse(code)))
