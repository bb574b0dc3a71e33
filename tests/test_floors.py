"""Every import points to a package of its own layer or of one below, and the promises about imports hold."""

from __future__ import annotations

import ast
import functools
import graphlib
import pathlib
import subprocess
import sys

import pytest

from tests.sources import nodes_of, tree_of

REPOSITORY = pathlib.Path(__file__).resolve().parent.parent
# From the ground up: a room imports from itself and from rooms on lower floors. The longest matching prefix decides.
FLOORS = [
    ["npu_bridge.base"],
    ["npu_bridge", "npu_bridge.graph", "npu_bridge.operators", "npu_bridge.options", "tensorflow1_compat"],
    ["npu_bridge.collective"],
    ["npu_bridge.gradients", "npu_bridge.tailing", "npu_bridge.hccl", "npu_bridge.optimizers", "hccl"],
    ["npu_bridge.session", "npu_bridge.stages"],
    ["npu_bridge.reporting"],
    ["npu_bridge.estimator"],
    ["npu_bridge.amp", "npu_bridge.boost", "npu_bridge.npu_init", "npu_device"],
    ["npu_run"],
    ["npu_bridge.run"],
]
PACKAGES = ("npu_bridge", "npu_run", "npu_device", "hccl", "tensorflow1_compat")
FLOOR_OF = {room: floor for floor, rooms in enumerate(FLOORS) for room in rooms}
MOST_FLOORS, MOST_ROOMS, MOST_AT_THE_ROOT = 10, 24, 8
TOP_LEVEL = """
    .ci .gitignore CHANGELOG.md CONTRIBUTING.md LICENSE MANIFEST.in Makefile README.md benchmarks configs docs examples
    hccl mkdocs.yml npu_bridge npu_device npu_run pyproject.toml ruff.toml setup.cfg setup.py tensorflow1_compat tests
    tools
"""


def modules():
    for package in PACKAGES:
        for path in sorted((REPOSITORY / package).rglob("*.py")):
            parts = path.relative_to(REPOSITORY).with_suffix("").parts
            yield ".".join(parts[:-1] if parts[-1] == "__init__" else parts), path


def room_of(module):
    return max((prefix for prefix in FLOOR_OF if f"{module}.".startswith(f"{prefix}.")), key=len)


@functools.cache
def imports_of(path):
    """(module, line) for every import of ours in a file, those inside functions included."""
    found = []
    for node in nodes_of(path):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            names = [f"{node.module}.{alias.name}" for alias in node.names]
        else:
            continue
        for name in names:
            if name.split(".")[0] in PACKAGES:
                found.append((name, node.lineno))
    return found


MODULES = dict(modules())


def test_imports_point_down():
    wrong = []
    for module, path in MODULES.items():
        own_room = room_of(module)
        for imported, line in imports_of(path):
            room = room_of(imported)
            where = f"{path.relative_to(REPOSITORY)}:{line} imports {imported}"
            if not (room == own_room or FLOOR_OF[room] < FLOOR_OF[own_room]):
                wrong.append(f"{where}, which is not on a lower floor")
    assert wrong == []


def test_no_modules_import_each_other_in_a_circle():
    """Imports inside functions and for types alone count, too; those of a package by what is in it do not."""
    graph = {}
    for module, path in MODULES.items():
        imported = {name if name in MODULES else name.rpartition(".")[0] for name, _ in imports_of(path)}
        graph[module] = {name for name in imported if name in MODULES and not f"{module}.".startswith(f"{name}.")}
    list(graphlib.TopologicalSorter(graph).static_order())  # which raises CycleError


def test_the_house_is_small_enough_to_know():
    """Few floors, few rooms, few modules outside of rooms."""
    rooms = [room for room in FLOOR_OF if room not in PACKAGES[:1] and (REPOSITORY / room.replace(".", "/")).is_dir()]
    assert len(FLOORS) <= MOST_FLOORS and len(rooms) <= MOST_ROOMS
    at_the_root = [path.name for path in (REPOSITORY / "npu_bridge").glob("*.py")]
    assert len(at_the_root) <= MOST_AT_THE_ROOT, at_the_root
    folders = {path.parent.name for path in (REPOSITORY / "npu_bridge").glob("*/__init__.py")}
    assert folders == {room.partition(".")[2] for room in rooms if room.startswith("npu_bridge.")}


def test_the_top_level_holds_nothing_stray():
    if not (REPOSITORY / ".git").exists():
        pytest.skip("not a checkout")
    tracked = subprocess.run(["git", "ls-files"], cwd=REPOSITORY, capture_output=True, text=True, check=True).stdout
    assert {path.partition("/")[0] for path in tracked.splitlines()} == set(TOP_LEVEL.split())


def test_options_know_nobody_and_only_collective_knows_horovod():
    for module, path in MODULES.items():
        for imported, line in imports_of(path):
            if room_of(module) == "npu_bridge.options" and room_of(imported) == "npu_bridge.collective":
                raise AssertionError(f"{path}:{line}: options read ranks from the environment, not from {imported}")
        imported_packages = {
            (alias.name if isinstance(node, ast.Import) else node.module or "").split(".")[0]
            for node in nodes_of(path)
            if isinstance(node, (ast.Import, ast.ImportFrom))
            for alias in node.names
        }
        if "horovod" in imported_packages:
            allowed = ("npu_bridge.collective", "npu_bridge.base", "npu_run")
            assert room_of(module) in allowed, f"{module} imports horovod"


def test_the_environment_is_read_in_one_module():
    """The launcher can also pass on a whole environment; no other code touches os.environ."""
    for module, path in MODULES.items():
        reads = [
            node.lineno
            for node in nodes_of(path)
            if getattr(node, "attr", getattr(node, "id", "")) in ("environ", "getenv", "putenv")
        ]
        allowed = module == "npu_bridge.base.environment" or room_of(module) == "npu_run"
        assert allowed or not reads, f"{module} reads the environment in lines {reads}"


def test_modules_name_themselves_in_a_docstring():
    for module, path in MODULES.items():
        assert ast.get_docstring(tree_of(path)), f"{module} has no docstring"


def test_importing_does_nothing():
    """No Horovod, no session, no graph op, no environment variable, no log handler."""
    code = """
import logging, os, sys
before = dict(os.environ)
import tensorflow as tf
tensorflow_set = {name: value for name, value in os.environ.items() if before.get(name) != value}
handlers = list(logging.getLogger().handlers)
import npu_bridge, npu_bridge.estimator.npu.npu_optimizer, npu_bridge.estimator.npu.npu_estimator, hccl.manage.api
import npu_device, npu_device.distribute, npu_device.npu_device, npu_device.train.optimizer
assert "horovod" not in sys.modules, "horovod"
assert {n: v for n, v in os.environ.items() if before.get(n) != v} == tensorflow_set, "environment"
assert logging.getLogger().handlers == handlers, "handlers"
assert tf.compat.v1.get_default_graph().get_operations() == [], "ops"
"""
    subprocess.run([sys.executable, "-c", code], cwd=REPOSITORY, check=True, timeout=120)
