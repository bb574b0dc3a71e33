"""Private names of TensorFlow, Keras, Estimator and Horovod stay in two places, and each of them still works.

The first half reads the sources. The second calls every function of `npu_bridge/tf_internals/` and
`npu_bridge/horovod_internals.py` once, so that a failure names what another version has changed.
"""

from __future__ import annotations

import ast
import pathlib

import pytest

REPOSITORY = pathlib.Path(__file__).resolve().parent.parent
HOMES = ("npu_bridge/tf_internals/", "npu_bridge/horovod_internals.py")
# What these hand on to scripts under documented names, unused by themselves.
HAND_ON = ("npu_bridge/npu_init.py", "npu_bridge/tf1/")
PRIVATE_MODULES = (
    "tensorflow.python",
    "tensorflow_estimator.python",
    "keras.src",
    "keras.api",
    "horovod.common",
    "horovod.runner",
    "horovod.tensorflow.mpi_ops",
)
# Of Python itself.
OF_PYTHON = {"_replace", "_asdict", "_fields", "_make", "_getframe", "_current_frames", "_exit", "_bootstrap"}
OF_PYTHON |= {"_call_with_frames_removed"}


def sources():
    for package in ("npu_bridge", "hccl", "npu_device"):
        for path in sorted((REPOSITORY / package).rglob("*.py")):
            name = str(path.relative_to(REPOSITORY))
            if not name.startswith(HOMES):
                yield name, ast.parse(path.read_text())


SOURCES = dict(sources())


def is_private(name):
    return name.startswith("_") and not name.endswith("__")


def defined_names():
    """Underscored names that this package gives itself: functions, classes, attributes, variables."""
    found = set()
    for tree in SOURCES.values():
        for node in ast.walk(tree):
            if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
                found.add(node.name)
            elif isinstance(node, (ast.Attribute, ast.Name)) and isinstance(node.ctx, ast.Store):
                found.add(node.attr if isinstance(node, ast.Attribute) else node.id)
    return found


def imports(tree):
    """(module, names bound, line) of every import."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield alias.name, [alias.asname or alias.name.split(".")[0]], node.lineno
        elif isinstance(node, ast.ImportFrom) and not node.level:
            for alias in node.names:
                yield f"{node.module}.{alias.name}", [alias.asname or alias.name], node.lineno


def test_private_modules_are_imported_in_their_homes_only():
    wrong = []
    for name, tree in SOURCES.items():
        used = {node.id for node in ast.walk(tree) if isinstance(node, ast.Name)}
        for module, bound, line in imports(tree):
            is_handed_on = name.startswith(HAND_ON) and not used.intersection(bound)
            if f"{module}.".startswith(tuple(f"{private}." for private in PRIVATE_MODULES)) and not is_handed_on:
                wrong.append(f"{name}:{line}: {module}")
    assert not wrong, "\n".join(wrong)
