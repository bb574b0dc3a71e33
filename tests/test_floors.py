"""Every import points to a package of its own layer or of one below, and the promises about imports hold."""

from __future__ import annotations

import ast
import pathlib
import subprocess
import sys

import pytest

REPOSITORY = pathlib.Path(__file__).resolve().parent.parent
GROUND, ENGINES, DOCUMENTED, FRONT_DOOR = 1, 2, 3, 4
# The longest matching prefix decides.
FLOORS = {
    "npu_bridge": GROUND,  # the package itself: the version; other names are imported when they are asked for
    "npu_bridge.base.version": GROUND,
    "npu_bridge.base.install": GROUND,
    "npu_bridge.base.machine": GROUND,
    "npu_bridge.base.lazy": GROUND,
    "npu_bridge.base.flat_tensors": GROUND,
    "npu_bridge.base.plain_config": GROUND,
    "npu_bridge.base.after_import": GROUND,
    "npu_bridge.base.session_wrapper": GROUND,
    "npu_bridge.base.tensorflow_start": GROUND,
    "npu_bridge.collective.key_value_server": GROUND,
    "npu_bridge.base.tf_internals": GROUND,
    "npu_bridge.base.horovod_internals": GROUND,
    "npu_bridge.options": GROUND,
    "npu_bridge.collective": GROUND,
    "npu_bridge.graph": GROUND,
    "npu_bridge.reporting.compare": ENGINES,
    "npu_bridge.gradients": ENGINES,
    "npu_bridge.operators": ENGINES,
    "npu_bridge.optimizers": ENGINES,
    "npu_bridge.session.precision": ENGINES,
    "npu_bridge.gradients.tailing": ENGINES,
    "npu_bridge.reporting": ENGINES,
    "npu_bridge.session": ENGINES,
    "npu_bridge.launch.trials": ENGINES,
    "npu_bridge._api": DOCUMENTED,
    "npu_bridge.amp": DOCUMENTED,
    "npu_bridge.boost": DOCUMENTED,
    "npu_bridge.estimator": DOCUMENTED,
    "npu_bridge.experimental": DOCUMENTED,
    "npu_bridge.hccl": DOCUMENTED,
    "npu_bridge.helper": DOCUMENTED,
    "npu_bridge.image": DOCUMENTED,
    "npu_bridge.npu_cpu": DOCUMENTED,
    "npu_bridge.profiler": DOCUMENTED,
    "npu_bridge.scoped_graph_manager": DOCUMENTED,
    "npu_bridge.stages": DOCUMENTED,
    "npu_bridge.tbe": DOCUMENTED,
    "tensorflow1_compat": DOCUMENTED,
    "npu_bridge.tf_adapter": DOCUMENTED,
    "hccl": DOCUMENTED,
    "npu_device": DOCUMENTED,
    "npu_device.compat": FRONT_DOOR,
    "npu_bridge.npu_init": FRONT_DOOR,
    "npu_bridge.launch": FRONT_DOOR,
    "npu_bridge.run": FRONT_DOOR,
}


def modules():
    for package in ("npu_bridge", "npu_device", "hccl"):
        for path in sorted((REPOSITORY / package).rglob("*.py")):
            parts = path.relative_to(REPOSITORY).with_suffix("").parts
            yield ".".join(parts[:-1] if parts[-1] == "__init__" else parts), path


def room_of(module):
    return max((prefix for prefix in FLOORS if f"{module}.".startswith(f"{prefix}.")), key=len)


def imports_of(path):
    """(module, line) for every import of ours in a file, those inside functions included."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            names = [f"{node.module}.{alias.name}" for alias in node.names]
        else:
            continue
        for name in names:
            if name.split(".")[0] in ("npu_bridge", "npu_device", "hccl"):
                yield name, node.lineno


MODULES = dict(modules())


@pytest.mark.parametrize("module", MODULES)
def test_imports_point_down(module):
    own_room = room_of(module)
    for imported, line in imports_of(MODULES[module]):
        where = f"{MODULES[module].relative_to(REPOSITORY)}:{line} imports {imported}"
        assert FLOORS[room_of(imported)] <= FLOORS[own_room], f"{where}, of a layer above"


def test_options_know_nobody_and_only_collective_knows_horovod():
    for module, path in MODULES.items():
        text = path.read_text()
        for imported, line in imports_of(path):
            if room_of(module) == "npu_bridge.options" and room_of(imported) == "npu_bridge.collective":
                raise AssertionError(f"{path}:{line}: options read ranks from the environment, not from {imported}")
        tree = ast.parse(text)
        imported_packages = {
            (alias.name if isinstance(node, ast.Import) else node.module or "").split(".")[0]
            for node in ast.walk(tree)
            if isinstance(node, (ast.Import, ast.ImportFrom))
            for alias in node.names
        }
        if "horovod" in imported_packages:
            allowed = ("npu_bridge.collective", "npu_bridge.base.horovod_internals", "npu_bridge.launch")
            assert room_of(module) in allowed, f"{module} imports horovod"


def test_the_environment_is_read_in_one_module():
    """The launcher may also pass on a whole environment; nobody else touches os.environ."""
    for module, path in MODULES.items():
        reads = [
            node.lineno
            for node in ast.walk(ast.parse(path.read_text()))
            if isinstance(node, ast.Attribute) and node.attr in ("environ", "getenv", "putenv")
        ]
        allowed = module == "npu_bridge.base.environment" or room_of(module) == "npu_bridge.launch"
        assert allowed or not reads, f"{module} reads the environment in lines {reads}"


def test_modules_name_themselves_in_a_docstring():
    for module, path in MODULES.items():
        assert ast.get_docstring(ast.parse(path.read_text())), f"{module} has no docstring"


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
