"""Every public name of the documented interface explains itself, in the form of the house."""

from __future__ import annotations

import importlib
import inspect
import re

import pytest

from tests.test_floors import MODULES, room_of

# In the order in which they come.
SECTIONS = ("Attributes", "Args", "Returns", "Yields", "Raises", "Graph", "Ranks", "Source", "Example")
# Rooms whose names scripts import, and one module.
DOCUMENTED = {"hccl", "npu_device", "tensorflow1_compat"}
DOCUMENTED |= {f"npu_bridge.{room}" for room in ("amp", "boost", "estimator", "hccl", "stages")}
DOCUMENTED_MODULES = [name for name in MODULES if room_of(name) in DOCUMENTED or name == "npu_bridge.tf_adapter"]


def own_names(module):
    """Yields (name, object) of a module's public definitions, and of the public methods of its classes."""
    for name in getattr(module, "__all__", ()):
        value = getattr(module, name)
        if not callable(value) or getattr(value, "__module__", None) != module.__name__:
            continue
        yield name, value
        if inspect.isclass(value):
            for method_name, method in vars(value).items():
                is_method = callable(method) or isinstance(method, (property, classmethod, staticmethod))
                if is_method and not method_name.startswith("_"):
                    yield f"{name}.{method_name}", getattr(value, method_name)


def problems_of(value):
    """Returns the missing parts of a docstring; a method without its own can use that of its base class."""
    text = inspect.getdoc(value)
    if not text:
        return ["there is none"]
    if not value.__doc__:
        return []
    first, *others = text.splitlines()
    found = []
    if not first.endswith((".", ":")) or len(first) > 120:
        found.append("its first line is no sentence")
    if others and others[0]:
        found.append("no empty line after the first")
    titles = re.findall(r"^([A-Z][a-z]+):(.*)$", text, re.MULTILINE)
    named = [title for title, _ in titles if title in SECTIONS]
    if named != sorted(named, key=SECTIONS.index):
        found.append(f"sections in the order {named}")
    arguments = re.search(r"^Args:\n((?:  .*\n?|\n)*)", text, re.MULTILINE)
    if arguments:
        found += _problems_of_arguments(arguments.group(1), value)
    return found


def _problems_of_arguments(section, value):
    explained = set()
    # A list of names can continue in a second line.
    for names in re.findall(r"^  (\*{0,2}[A-Za-z_][\w, *\n]*?):\s", section, re.MULTILINE):
        explained |= {name.strip(" *\n") for name in names.split(",")}
    made_by = _constructor_of(value) if inspect.isclass(value) else value
    parameters = set(inspect.signature(made_by).parameters) - {"self", "cls"}
    return [
        f"{kind}: {sorted(names)}"
        for kind, names in (("not explained", parameters - explained), ("no argument", explained - parameters))
        if names
    ]


def _constructor_of(value):
    """Returns the constructor of the most derived class that defines one."""
    base = next(base for base in value.__mro__ if {"__init__", "__new__"} & set(vars(base)))
    return vars(base).get("__init__") or vars(base)["__new__"].__func__


@pytest.mark.parametrize("module_name", DOCUMENTED_MODULES)
def test_names_explain_themselves(module_name):
    module = importlib.import_module(module_name)
    assert problems_of(module) == []
    found = {name: problems for name, value in own_names(module) if (problems := problems_of(value))}
    assert found == {}


def test_what_is_found():
    """The check itself."""

    def silent(given):
        pass

    def careless(given, other):
        """does something

        Raises:
          ValueError: never.
        Args:
          given: a
            number: not a name.
          third: another.
        """

    def careful(given, *others, **more):
        """Does something.

        Args:
          given, *others,
            **more: numbers.
        Raises:
          ValueError: never.
        """

    assert problems_of(silent) == ["there is none"]
    assert problems_of(careless) == [
        "its first line is no sentence",
        "sections in the order ['Raises', 'Args']",
        "not explained: ['other']",
        "no argument: ['third']",
    ]
    assert problems_of(careful) == []
