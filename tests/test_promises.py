"""Every promise has a case, and `make test` runs it."""

from __future__ import annotations

import subprocess
import sys

from tests.promises import PROMISES
from tests.rank_pool import REPOSITORY


def fast_cases(session):
    """Returns the cases of `make test`: from this run if it collected all files, else from another process."""
    files = sorted({f"tests/{case.partition('::')[0]}" for promises in PROMISES.values() for case in promises.values()})
    fast = {
        item.nodeid.rpartition("@")[0] or item.nodeid for item in session.items if not item.get_closest_marker("slow")
    }
    if {case.partition("::")[0] for case in fast}.issuperset(files) and is_whole(session.config):
        return fast
    command = [sys.executable, "-m", "pytest", "--collect-only", "-q", "-p", "no:xdist", "-m", "not slow", *files]
    listed = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, timeout=600)
    assert listed.returncode == 0, listed.stdout[-3000:] + listed.stderr[-3000:]
    return {line for line in listed.stdout.splitlines() if "::" in line}


def is_whole(config):
    """Returns whether a run takes whole files: neither single cases nor a part of them by `-k`."""
    return not config.option.keyword and not any("::" in argument for argument in config.args)


def test_every_promise_is_held_by_a_case_of_make_test(request):
    fast = fast_cases(request.session)
    fast |= {case.partition("[")[0] for case in fast}
    lost = [
        f"{page}: {promise!r} has no case of `make test`: tests/{case} is gone or marked slow"
        for page, promises in PROMISES.items()
        for promise, case in promises.items()
        if f"tests/{case}" not in fast
    ]
    assert lost == []


def test_a_case_holds_one_promise():
    """Otherwise the list would look longer than it is."""
    cases = [case for promises in PROMISES.values() for case in promises.values()]
    assert sorted({case for case in cases if cases.count(case) > 1}) == []
