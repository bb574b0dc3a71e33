"""Tells the cases of `make test` from those that only `make test-all` runs.

`make test` holds every promise once. A case that repeats another one with other values, or takes long, is marked at its
definition, with a reason:

    @pytest.mark.slow("a job that is killed at each of five moments")  # a function; `pytestmark` marks a module
    @pytest.mark.few_fast(1, "the other rules take the same way")      # the first of its parameters stays
    @pytest.mark.few_fast("each", "not every pair")                    # each value of each parameter stays, once
    @pytest.mark.few_fast(["2-adam"], "four ranks share two cores")    # these parameters stay, by their ids
"""

from __future__ import annotations

import pytest

_MARKS = (
    "slow(reason): not in `make test`, but in `make test-all`",
    "few_fast(keep, reason): which of its parameters are in `make test`",
    "horovod(reason): not run with `--collectives tensorflow`",
)


def register_marks(config):
    """Makes the marks known; not in setup.cfg, a change of which sets up every environment again."""
    for mark in _MARKS:
        config.addinivalue_line("markers", mark)


def mark_slow(items):
    """Marks as slow the parameters that `few_fast` leaves out, and refuses marks without a reason."""
    seen = {}
    for item in items:
        for mark in item.iter_markers("slow"):
            _check(item, mark, reason=mark.args[0] if len(mark.args) == 1 else None)
        mark = item.get_closest_marker("few_fast")
        if mark is None:
            continue
        keep, reason = mark.args if len(mark.args) == 2 else (None, None)
        _check(item, mark, reason, keep == "each" or isinstance(keep, (int, list)))
        function = (item.path, item.parent.nodeid, getattr(item, "originalname", item.name))
        if not _is_kept(item, keep, seen.setdefault(function, set())):
            item.add_marker(pytest.mark.slow(reason))


def mark_ranks(items):
    """Marks the cases with the fixture `on_ranks`; one that starts a job of its own is marked at its definition."""
    for item in items:
        if "rank_pools" in item.fixturenames:
            item.add_marker("ranks")


def _is_kept(item, keep, seen):
    if isinstance(keep, list):
        return item.callspec.id in keep
    if keep == "each":
        new = {(name, id(value)) for name, value in item.callspec.params.items()} - seen
        seen |= new
        return bool(new)
    seen.add(item.nodeid)
    return len(seen) <= keep


def _check(item, mark, reason, is_well=True):
    if not (isinstance(reason, str) and reason.strip() and is_well):
        raise pytest.UsageError(f"{item.nodeid}: the mark `{mark.name}` is used as tests/tiers.py shows, with a reason")
