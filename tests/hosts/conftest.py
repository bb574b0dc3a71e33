"""Two hosts of a network of their own, for the tests of this folder; skipped where there can be none."""

from __future__ import annotations

import pytest

from benchmarks.lab.two_hosts import reason_for_no_hosts, two_hosts
from tests.npu_run.launching import needs_horovod


@pytest.fixture(scope="session")
def _network():
    reason = reason_for_no_hosts()
    if reason:
        pytest.skip(reason)
    with two_hosts(rate="1gbit") as hosts:
        yield hosts


@pytest.fixture(params=[pytest.param("horovod", marks=needs_horovod), "tensorflow"])
def hosts(_network, request, monkeypatch):
    """Two hosts on a link of 1 Gbit/s, with nothing running on them and the link whole, for each engine of ranks."""
    monkeypatch.setenv("NPU_COLLECTIVES", request.param)
    monkeypatch.setenv("NPU_ALLOW_OPEN_PORTS", "1")
    yield _network
    _network.end_all_processes()
    _network.fix()
