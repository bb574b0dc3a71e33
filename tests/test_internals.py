"""Private names of TensorFlow, Keras, Estimator and Horovod stay in two places, and each of them still works.

The first tests read the sources. The last ones call every function of `npu_bridge/base/tf_internals/` and
`npu_bridge/base/horovod_internals.py`, so that a failure names what another version has changed.
"""

from __future__ import annotations

import ast
import functools
import importlib
import pathlib
import sys

import pytest
import tensorflow as tf

from npu_bridge.base import horovod_internals
from npu_bridge.base.tf_internals import (
    callers,
    contrib,
    estimators,
    functions,
    graphs,
    keras3,
    profiles,
    savers,
    servers,
    sessions,
    training,
)
from tests.canaries import (
    CANARIES,
    RANK_CANARIES,
    functions_of,
    of_contrib,
    of_functions,
    of_graphs,
    of_horovod,
    of_keras3,
    of_profiles,
    of_servers,
    of_sessions,
    of_training,
)
from tests.canaries.inherited import INHERITED

REPOSITORY = pathlib.Path(__file__).resolve().parent.parent
HOMES = ("npu_bridge/base/tf_internals/", "npu_bridge/base/horovod_internals.py")
# Names that these modules only pass on to scripts, under documented names.
HAND_ON = ("npu_bridge/npu_init.py", "tensorflow1_compat/")
PRIVATE_MODULES = (
    "horovod.common",
    "horovod.runner",
    "horovod.tensorflow.mpi_ops",
    "keras.api",
    "keras.src",
    "tensorflow.python",
    "tensorflow_estimator.python",
)
# Of Python itself: of namedtuples, modules and frames.
OF_PYTHON = {"_asdict", "_fields", "_make", "_replace", "_current_frames", "_exit", "_getframe"}
OF_PYTHON |= {"_bootstrap", "_call_with_frames_removed", "_fixup_main_from_path", "_threads_queues"}
ASKING = ("getattr", "hasattr", "setattr", "delattr")
# Names of this package that TensorFlow has as well, by the file.
OWN = {"tensorflow1_compat/proxies.py": {"_name"}}
INHERITED_NAMES = {name for names in INHERITED.values() for name in names}
# Each module and its canaries.
MODULES = {
    contrib: of_contrib,
    estimators: of_contrib,
    functions: of_functions,
    graphs: of_graphs,
    keras3: of_keras3,
    profiles: of_profiles,
    servers: of_servers,
    sessions: of_sessions,
    callers: of_training,
    savers: of_training,
    training: of_training,
    horovod_internals: of_horovod,
}


def python_files(packages=("npu_bridge", "npu_run", "hccl", "npu_device", "tensorflow1_compat")):
    for package in packages:
        for path in sorted((REPOSITORY / package).rglob("*.py")):
            yield str(path.relative_to(REPOSITORY)), ast.parse(path.read_text())


@functools.cache
def sources():
    """The files outside of the homes, parsed when the first test wants them."""
    return {name: tree for name, tree in python_files() if not name.startswith(HOMES)}


def is_private(name):
    return name == "__internal__" or (name.startswith("_") and not name.endswith("__"))


def names_reached_at_home():
    """Every private attribute that the homes read, write or ask for."""
    found = set()
    for name, tree in python_files(["npu_bridge"]):
        if name.startswith(HOMES):
            found |= {node.attr for node in ast.walk(tree) if isinstance(node, ast.Attribute) and is_private(node.attr)}
            texts = (node.value for node in ast.walk(tree) if isinstance(node, ast.Constant))
            found |= {text for text in texts if isinstance(text, str) and text.isidentifier() and is_private(text)}
    return found


def own_names(tree):
    """Underscored names that a file gives to what it defines."""
    for node in ast.walk(tree):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            yield node.name
        elif isinstance(node, (ast.Attribute, ast.Name)) and isinstance(node.ctx, ast.Store):
            yield node.attr if isinstance(node, ast.Attribute) else node.id
        elif isinstance(node, ast.Subscript) and isinstance(node.ctx, ast.Store):  # of an object's `__dict__`
            yield getattr(node.slice, "value", "")
        elif isinstance(node, ast.Call) and getattr(node.func, "attr", "") == "update":
            yield from (keyword.arg for keyword in node.keywords)


def imports_of(tree):
    """(module, names bound, line) of every import."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield alias.name, [alias.asname or alias.name.split(".")[0]], node.lineno
        elif isinstance(node, ast.ImportFrom) and not node.level:
            for alias in node.names:
                yield f"{node.module}.{alias.name}", [alias.asname or alias.name], node.lineno


def attributes_of(tree):
    """(object, private attribute, line): by a dot, and by a text given to `getattr` and its like."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and is_private(node.attr):
            yield node.value, node.attr, node.lineno
        elif isinstance(node, ast.Call) and getattr(node.func, "id", "") in (
            "getattr",
            "hasattr",
            "setattr",
            "delattr",
        ):
            name = getattr(node.args[1], "value", None)
            if isinstance(name, str) and is_private(name):
                yield node.args[0], name, node.lineno


def is_own_object(node):
    """Whether an object is `self`, `cls` or `super()`."""
    return getattr(node, "id", "") in ("self", "cls") or getattr(getattr(node, "func", None), "id", "") == "super"


def test_private_modules_are_imported_in_their_homes_only():
    wrong, private = [], tuple(f"{module}." for module in PRIVATE_MODULES)
    for name, tree in sources().items():
        used = {node.id for node in ast.walk(tree) if isinstance(node, ast.Name)}
        for module, bound, line in imports_of(tree):
            is_handed_on = name.startswith(HAND_ON) and not used.intersection(bound)
            if f"{module}.".startswith(private) and not is_handed_on:
                wrong.append(f"{name}:{line}: {module}")
    assert not wrong, "\n".join(["Private modules belong in npu_bridge/base/tf_internals/:", *wrong])


def test_private_attributes_are_touched_in_their_homes_only():
    """A subclass may use what its base class has; `tests/canaries/inherited.py` says what that is."""
    wrong, everywhere = [], {each for tree in sources().values() for each in own_names(tree)}
    reached = (names_reached_at_home() | INHERITED_NAMES) - OF_PYTHON
    for name, tree in sources().items():
        own = OWN.get(name, set())
        for node, attribute, line in attributes_of(tree):
            is_known = attribute in everywhere or attribute in OF_PYTHON
            if is_own_object(node):
                is_right = is_known or attribute in INHERITED_NAMES
            else:
                is_right = is_known and (attribute not in reached or attribute in own)
            if not is_right:
                wrong.append(f"{name}:{line}: {attribute}")
    assert not wrong, "\n".join(["Private names belong in npu_bridge/base/tf_internals/:", *wrong])


def test_what_subclasses_override_is_listed():
    """Not of `tensorflow1_compat`, whose own tests know what TensorFlow 1.15 had."""
    missing = set()
    for name in sources():
        is_left_out = name.startswith(("tensorflow1_compat/", "npu_run/", "npu_bridge/run.py"))
        if not is_left_out and (of_keras3.IS_BESIDE or name not in of_keras3.LOADING):
            importlib.import_module(name[: -len(".py")].replace("/", ".").removesuffix(".__init__"))
    ours = [module for name, module in list(sys.modules.items()) if name.split(".")[0] in ("npu_bridge", "npu_device")]
    classes = [value for module in ours for value in vars(module).values() if isinstance(value, type)]
    for own in classes:
        if not own.__module__.startswith(("npu_bridge.", "npu_device.")):
            continue
        for base in own.__mro__:
            if base.__module__.split(".")[0] in ("tensorflow", "tensorflow_estimator", "keras", "tf_keras"):
                overridden = {name for name in vars(own) if is_private(name) and name in vars(base)}
                overridden -= {name for name in overridden if name.startswith(("_abc_", "_tf_api_", "_keras_api_"))}
                missing |= {f"{own.__name__}.{name} of {base.__name__}" for name in overridden - INHERITED_NAMES}
    assert not missing, f"tests/canaries/inherited.py does not list {sorted(missing)}"


def test_every_function_has_a_canary():
    functions = {function for module in MODULES for function in functions_of(module)}
    without = functions - {*CANARIES, *RANK_CANARIES}
    assert {f"{function.__module__}.{function.__name__}" for function in without} == set()


@pytest.mark.parametrize("function", CANARIES, ids=lambda function: function.__name__)
def test_private_names_work(function):
    if function.__module__ == keras3.__name__ and not of_keras3.IS_BESIDE:
        pytest.skip(of_keras3.REASON)
    for check in CANARIES[function]:
        _tell(f"{function.__module__}.{function.__name__}", check)


@pytest.mark.parametrize("base", INHERITED)
def test_base_classes_have_what_subclasses_use(base):
    if base.startswith("keras.") and not of_keras3.IS_BESIDE:
        pytest.skip(of_keras3.REASON)

    def check():
        instance = of_training.instance_of(base)
        missing = [name for name in INHERITED[base] if not hasattr(instance, name)]
        assert not missing, f"it has no {', '.join(missing)}"

    _tell(base, check)


def test_private_names_of_horovod_work_on_ranks(on_ranks):
    for failed in on_ranks(2, of_horovod.run_on_rank):
        for name, error in failed.items():
            pytest.fail(f"horovod_internals.{name}: {error}", pytrace=False)


def _tell(what, check):
    """One line for what no longer works."""
    try:
        check()
    except Exception as error:  # whatever another version raises
        text = f"{what} no longer works with TensorFlow {tf.__version__}: {type(error).__name__}: {error}"
        pytest.fail(text, pytrace=False)
