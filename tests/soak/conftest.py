"""Options of the soak, which runs only where `--faults` is given: `make test-soak`."""

from __future__ import annotations


def pytest_addoption(parser):
    group = parser.getgroup("soak")
    group.addoption("--faults", type=int, default=0, help="how many faults in all")
    group.addoption("--each", type=int, default=40, help="how many in one job")
    group.addoption("--seed", type=int, default=1, help="of all that is drawn")
    group.addoption("--only", type=int, help="the job of this number alone, with the faults that it draws")
    group.addoption("--kinds", default="", help="parts of the names of the kinds to draw from, with commas")
    group.addoption("--homes", default="", help="the kinds of jobs: plain,slots,disk,clock,hosts")
    group.addoption("--faces", default="", help="the faces: estimator,session,keras")
    group.addoption("--out", default="out/soak", help="a folder for jobs that fail, and for table.md and table.json")


def pytest_ignore_collect(collection_path, config):
    return True if collection_path.name == "test_soak.py" and not config.getoption("faults", 0) else None
