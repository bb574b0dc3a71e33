"""The threads of Horovod run before others where the system permits it."""

from __future__ import annotations

import os
import threading

import pytest

from npu_bridge import collective
from npu_bridge.base import environment
from npu_bridge.collective import thread_priority
from npu_bridge.collective.thread_priority import raised_for_new_threads, set_raised

REAL_TIME = os.SCHED_FIFO | os.SCHED_RESET_ON_FORK


def is_permitted():
    try:
        os.sched_setscheduler(0, os.SCHED_FIFO | os.SCHED_RESET_ON_FORK, os.sched_param(1))
    except PermissionError:
        return False
    os.sched_setscheduler(0, os.SCHED_OTHER, os.sched_param(0))
    return True


def policies_of_horovod():
    """On a rank: of the threads of Horovod as they are, with the same priority as others, and raised again."""
    assert collective.current().size == 2

    def policies():
        return sorted({os.sched_getscheduler(thread) for thread in thread_priority._noted})

    found = [len(thread_priority._noted), policies()]
    for is_raised in (False, True):
        assert set_raised(is_raised) == is_permitted()
        found.append(policies())
    return [*found, os.sched_getscheduler(0)]


@pytest.mark.ranks(2)
def test_threads_of_horovod_are_raised_and_no_others(on_ranks):
    for count, *policies in on_ranks(2, policies_of_horovod):
        assert count >= 2  # one of Horovod, and those of Gloo
        raised = REAL_TIME if is_permitted() else os.SCHED_OTHER
        lowered = os.SCHED_OTHER | os.SCHED_RESET_ON_FORK if is_permitted() else os.SCHED_OTHER
        assert policies == [[raised], [lowered], [raised], os.SCHED_OTHER]


@pytest.mark.parametrize(
    ("switch", "address", "is_raised"), [("", "127.0.0.1", True), ("0", "127.0.0.1", False), ("1", "", False)]
)
def test_it_is_done_under_gloo_unless_it_is_switched_off(monkeypatch, switch, address, is_raised):
    monkeypatch.setattr(thread_priority, "_noted", set())
    monkeypatch.setenv("NPU_COMMUNICATION_PRIORITY", switch)
    monkeypatch.setenv("HOROVOD_GLOO_RENDEZVOUS_ADDR", address)
    monkeypatch.setenv("HOROVOD_GLOO_RENDEZVOUS_PORT", "1" if address else "")
    is_over = threading.Event()
    thread = threading.Thread(target=is_over.wait)
    with raised_for_new_threads():
        thread.start()
    try:
        expected = REAL_TIME if is_raised and is_permitted() else os.SCHED_OTHER
        assert os.sched_getscheduler(thread.native_id) == expected
    finally:
        is_over.set()
        thread.join()


def test_a_value_that_is_no_switch_is_refused(monkeypatch):
    monkeypatch.setenv("NPU_COMMUNICATION_PRIORITY", "high")
    with pytest.raises(ValueError, match="NPU_COMMUNICATION_PRIORITY is no switch.*0 or 1.*'high'"):
        environment.prefers_communication()
