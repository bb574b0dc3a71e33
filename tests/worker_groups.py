"""Chooses the cases that one worker runs, as `--dist loadgroup` of pytest-xdist requires.

Ranks that wait for each other take whole cores, so more jobs at once would be slower than one after the other: ranks
that stay up are one worker's, all other jobs are one worker's. Jobs on several hosts and under a cluster's scheduler
mostly wait, and are a third worker's. Files that start no ranks go one by one to the worker that is free.
"""

from __future__ import annotations

import pathlib
import types

_LAUNCHES = pathlib.Path(__file__).parent / "npu_run"
_WAITING_JOBS = ("hosts", "clusters")  # folders, of slow cases only
# By these names tests/npu_run and what it calls start processes; a `Job` is one of benchmarks/many_ranks.py.
_STARTERS = {"Job", "Popen", "fork", "multiprocessing", "subprocess"}


def group_of(item) -> str:
    """The name of a case's group."""
    if "rank_pools" in item.fixturenames:
        return "ranks"
    if item.path.parent.name in _WAITING_JOBS:
        return "waiting jobs"
    if item.get_closest_marker("ranks") or (item.path.parent == _LAUNCHES and starts_processes(item)):
        return "jobs"
    if hasattr(item.module, "tree_of") or hasattr(item.module, "nodes_of"):
        return "sources"
    return f"{item.path.parent.name}/{item.path.stem}"


def starts_processes(item) -> bool:
    """Whether the functions of a case start processes: its own, its fixtures, and those of the tests that they call."""
    fixtures = [definitions[-1].func for definitions in item._fixtureinfo.name2fixturedefs.values()]
    waiting, seen = [item.function, *fixtures], set()
    while waiting:
        function = waiting.pop()
        if function in seen or not function.__module__.startswith("tests."):
            continue
        seen.add(function)
        names = _names_in(function.__code__)
        if names & _STARTERS:
            return True
        found = (function.__globals__.get(name) for name in names)
        waiting += [each for each in found if isinstance(each, types.FunctionType)]
    return False


def _names_in(code):
    """Returns the names that a function mentions, also in functions inside of it."""
    inner = (_names_in(each) for each in code.co_consts if isinstance(each, types.CodeType))
    return set(code.co_names).union(*inner)
