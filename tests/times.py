"""Keeps the times of a run: minutes by folder, the slowest cases, and in `make test` a limit for each case.

`tests/conftest.py` registers it; with several workers it works where their reports arrive. The table is printed after
the run, and stays in out/test_times.txt until the next one.
"""

from __future__ import annotations

import collections
import os
import pathlib
import time

import pytest

TABLE = pathlib.Path(__file__).resolve().parent.parent / "out" / "test_times.txt"
# A case of `make test` that takes longer is to be made shorter, or belongs to `make test-all`. Where others compute at
# the start, the limit grows by what they take of the cores; CASE_SECS in the environment sets another one. In a run of
# the whole suite, the limit is at least this share of all case time, so that a slow machine is not taken for slow
# cases: 20 s in a run of eight minutes.
MOST_SECS = float(os.environ.get("CASE_SECS", 20 * (1 + os.getloadavg()[0] / (os.cpu_count() or 1))))
_MOST_OF_ALL = 0.02
_PRINTED, _WRITTEN = 10, 200


class Times:
    """Adds up what the phases of cases took.

    Args:
      is_limited: whether a case that takes too long makes the run fail.
      table: the file to write.
    """

    def __init__(self, is_limited: bool, table: pathlib.Path):
        self._is_limited = is_limited
        self._table = table
        self._began = time.monotonic()
        self._all = collections.Counter()
        self._calls = collections.Counter()

    def pytest_runtest_logreport(self, report):
        name = report.nodeid.rpartition("@")[0] or report.nodeid  # xdist writes the group behind it
        self._all[name] += report.duration
        if report.when == "call":
            self._calls[name] = report.duration

    @pytest.hookimpl(tryfirst=True)
    def pytest_sessionfinish(self, session):
        if self._all:
            self._table.parent.mkdir(parents=True, exist_ok=True)
            self._table.write_text("\n".join([*self.folders(), "", *self.slowest(_WRITTEN), *self.too_slow(), ""]))
        if self.too_slow() and session.exitstatus == pytest.ExitCode.OK:
            session.exitstatus = pytest.ExitCode.TESTS_FAILED

    def pytest_terminal_summary(self, terminalreporter):
        if not self._all:
            return
        terminalreporter.section(f"times ({self._table.parent.name}/{self._table.name})")
        for line in [*self.folders(), "", *self.slowest(_PRINTED)]:
            terminalreporter.write_line(line)
        for line in self.too_slow():
            terminalreporter.write_line(line, red=True)

    def folders(self) -> list[str]:
        """A line for each folder of tests, the one that takes longest first, and one for all."""
        secs, cases = collections.Counter(), collections.Counter()
        for name, duration in self._all.items():
            path = name.partition("::")[0].split("/")
            folder = "/".join(path[:2]) if len(path) > 2 else path[0]
            secs[folder] += duration
            cases[folder] += name in self._calls
        lines = [f"{amount / 60:8.2f} min {cases[folder]:6} cases  {folder}" for folder, amount in secs.most_common()]
        minutes = (time.monotonic() - self._began) / 60
        return [*lines, f"{sum(secs.values()) / 60:8.2f} min {len(self._calls):6} cases  in {minutes:.1f} minutes"]

    def slowest(self, count: int) -> list[str]:
        """A line for each of the slowest cases, what was made ready for them and cleared away included."""
        return [f"{secs:8.2f} s  {name}" for name, secs in self._all.most_common(count)]

    def too_slow(self) -> list[str]:
        """A sentence for each case that takes longer than a case of `make test` may."""
        most = max(MOST_SECS, _MOST_OF_ALL * sum(self._all.values()))
        return [
            f"{name} took {secs:.1f} s; a case of `make test` takes at most {most:.0f} s here. "
            f"Make it shorter, or mark it as slow (tests/tiers.py)."
            for name, secs in self._calls.most_common()
            if self._is_limited and secs > most
        ]


def keep_times(config, table: pathlib.Path = TABLE):
    """Registers the plugin in the process that gets all reports."""
    if not hasattr(config, "workerinput") and not config.option.collectonly:
        # Not in a run inside of another one, which has its own choice of cases, and shares the processor.
        config.pluginmanager.register(Times(config.option.markexpr == "not slow", table), "times")
