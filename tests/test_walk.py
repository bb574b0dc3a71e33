"""The functions that docs/one_step.md lists for one step exist, and each calls those listed below it."""

from __future__ import annotations

import ast
import importlib
import inspect
import pathlib
import pkgutil
import re
import sys
import textwrap

import pytest
import tensorflow as tf

from npu_bridge import collective
from npu_bridge.collective.engines.horovod_ranks import HorovodCommunicator
from npu_bridge.estimator.npu.npu_loss_scale_manager import ExponentialUpdateLossScaleManager
from npu_bridge.estimator.npu.npu_optimizer import NPUOptimizer
from npu_bridge.gradients import stages
from npu_bridge.gradients.stage import HOOKS, Stage, is_hook_overridden
from tests.goldens.two_layers import in_graph
from tests.rank_pool import on_each_rank

REPOSITORY = pathlib.Path(__file__).resolve().parent.parent
MOST_FILES = 12


def walk():
    """The list as (name, position of its caller in the list or None), in order."""
    page = (REPOSITORY / "docs" / "one_step.md").read_text()
    section = page.partition("## Function by function\n")[2].partition("\n## ")[0]
    items, open_items = [], []
    for indent, name in re.findall(r"^( *)- `([\w.]+)`", section, re.MULTILINE):
        del open_items[len(indent) // 2 :]
        items.append((name, open_items[-1] if open_items else None))
        open_items.append(len(items) - 1)
    return items


def source_of(name):
    """The file of a function, and its definition there."""
    if is_foreign(name):
        function = foreign_function(name)
        return inspect.getsourcefile(function), ast.parse(textwrap.dedent(inspect.getsource(function))).body[0]
    parts = name.split(".")
    depth = next(end for end in range(len(parts), 0, -1) if path_of(parts[:end]).exists())
    node = ast.parse(path_of(parts[:depth]).read_text())
    for part in parts[depth:]:
        node = next(child for child in node.body if getattr(child, "name", None) == part)
    assert isinstance(node, ast.FunctionDef), name
    return path_of(parts[:depth]), node


def first_line_of(name):
    """The file and the first line of a function, as its code object has them."""
    if is_foreign(name):
        code = foreign_function(name).__code__
        return code.co_filename, code.co_firstlineno
    path, node = source_of(name)
    return str(path), min([node.lineno, *(decorator.lineno for decorator in node.decorator_list)])


def is_foreign(name):
    return name.startswith(("tf.", "horovod."))


def foreign_function(name):
    return pkgutil.resolve_name(re.sub(r"^tf\.", "tensorflow.", name))


def path_of(parts):
    return REPOSITORY.joinpath("npu_bridge", *parts).with_suffix(".py")


def lines_that_name(node, name):
    """Where a function calls another one, or hands it on to be called."""
    called = name.split(".")[-2] if name.endswith(".__init__") else name.split(".")[-1]
    names = {(part.lineno, getattr(part, "id", getattr(part, "attr", None))) for part in ast.walk(node) if is_use(part)}
    return sorted(line for line, found in names if found == called)


def is_use(node):
    return isinstance(node, (ast.Name, ast.Attribute)) and isinstance(node.ctx, ast.Load)


def test_each_function_calls_those_below_it_in_the_order_of_the_list():
    items = walk()
    assert len(items) > 30
    reached = {}  # caller to the line of its latest call that the list has
    for name, caller in items:
        source_of(name)
        if caller is not None:
            path, node = source_of(items[caller][0])
            lines = [line for line in lines_that_name(node, name) if line >= reached.get(caller, 0)]
            assert lines, f"{items[caller][0]} ({path}:{node.lineno}) does not call {name} at that place"
            reached[caller] = lines[0]


def test_a_gradient_visits_few_files():
    assert len({source_of(name)[0] for name, _ in walk() if not is_foreign(name)}) <= MOST_FILES


@pytest.mark.parametrize("call", ["horovod.tensorflow.allreduce", "horovod.tensorflow.grouped_allreduce"])
def test_the_walk_leads_from_minimize_to_each_call_of_horovod(call):
    items = walk()
    (position,) = (position for position, (name, _) in enumerate(items) if name == call)
    callers = []
    while position is not None:
        name, position = items[position]
        callers.append(name)
    assert callers[-1] == "tf.compat.v1.train.Optimizer.minimize"


def test_the_table_of_stages_lists_their_hooks():
    table = (REPOSITORY / "docs" / "one_step.md").read_text().partition("\n| ---")[2].partition("\n\n")[0]
    rows = [[re.findall(r"`([\w ]+)`", cell) for cell in line.split("|")[1:4]] for line in table.splitlines()[1:]]
    modules = [
        importlib.import_module(f"{stages.__name__}.{each.name}") for each in pkgutil.iter_modules(stages.__path__)
    ]
    kinds = [each for module in modules for name, each in vars(module).items() if not name.startswith("_")]
    kinds = {each for each in kinds if isinstance(each, type) and issubclass(each, Stage)}
    made = {each.__name__: (each.place, [hook for hook in HOOKS if is_hook_overridden(each, hook)]) for each in kinds}
    assert {name: (place, hooks) for (place,), names, hooks in rows for name in names} == {
        name: (place, hooks) for name, (place, hooks) in made.items() if hooks
    }


@on_each_rank(2)
@in_graph
def test_a_real_step_takes_this_way():
    """Notes which functions of the list run while which others do, as a step is built."""
    functions = {first_line_of(name): name for name, _ in walk()}
    running, calls = [], set()

    def watch(frame, event, argument):
        name = functions.get((frame.f_code.co_filename, frame.f_code.co_firstlineno))
        if name is not None and event == "call":
            calls.update((caller, name) for caller in [None, *running])
            running.append(name)
        elif name is not None and event == "return":
            running.pop()

    kernel = tf.compat.v1.get_variable("kernel", [8, 4], use_resource=True)
    loss = tf.reduce_sum(kernel**2)
    sys.setprofile(watch)
    try:
        manager = ExponentialUpdateLossScaleManager(2.0**10, 5)
        optimizer = NPUOptimizer(
            tf.compat.v1.train.AdamOptimizer(),
            manager,
            is_distributed=True,
            is_loss_scale=True,
        )
        optimizer.minimize(loss)
    finally:
        sys.setprofile(None)
    has_horovod, items = isinstance(collective.current(), HorovodCommunicator), walk()
    listed = [(None if caller is None else items[caller][0], name) for name, caller in items]
    missing = [call for call in listed if call not in calls]
    assert not [name for _, name in missing if has_horovod or "horovod" not in name]
