"""Two hosts of a network of their own, for the tests of this folder; skipped where there can be none."""

from __future__ import annotations

import pytest

from benchmarks.lab.two_hosts import reason_for_no_hosts, two_hosts


@pytest.fixture(scope="session")
def _network():
    reason = reason_for_no_hosts()
    if reason:
        pytest.skip(reason)
    with two_hosts(rate="1gbit") as hosts:
        yield hosts


@pytest.fixture
def hosts(_network):
    """Two hosts on a link of 1 Gbit/s, with nothing running on them and the link whole."""
    yield _network
    _network.end_all_processes()
    _network.fix()
