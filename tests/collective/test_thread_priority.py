"""The threads of Horovod run before others where it is asked for and permitted."""

from __future__ import annotations

import os
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from npu_bridge.base import environment
from npu_bridge.collective.engines import thread_priority
from npu_bridge.collective.engines.thread_priority import give_new_threads_real_time_priority
from tests.npu_run.launching import needs_horovod, npu_run, write_script

REAL_TIME = os.SCHED_RR | os.SCHED_RESET_ON_FORK


def is_permitted():
    """Asks in a thread that ends: a thread can be permitted to raise itself and not to lower itself again."""
    with ThreadPoolExecutor(1) as thread:
        asked = thread.submit(os.sched_setscheduler, 0, REAL_TIME, os.sched_param(1))
    return not isinstance(asked.exception(), PermissionError)


JOB = """
import os
import npu_bridge.npu_init
from npu_bridge import collective
from npu_bridge.collective.engines import thread_priority

assert collective.current().size == 2


def policies():
    return sorted({os.sched_getscheduler(thread) for thread in thread_priority._noted})


found = [policies(), thread_priority.set_real_time(False), policies(), os.sched_getscheduler(0)]
print("found", len(thread_priority._noted) > 1, found)
"""


@pytest.mark.slow("a job of its own, for speed and not for numbers")
@needs_horovod
def test_threads_of_horovod_are_raised_and_no_others(tmp_path, monkeypatch):
    write_script(tmp_path, JOB)
    monkeypatch.setenv("NPU_COMMUNICATION_PRIORITY", "1")
    code, output = npu_run("-np", 2, "train.py", cwd=tmp_path)
    lowered = os.SCHED_OTHER | os.SCHED_RESET_ON_FORK
    raised = [[REAL_TIME], True, [lowered], os.SCHED_OTHER]
    usual = [[os.SCHED_OTHER], False, [os.SCHED_OTHER], os.SCHED_OTHER]
    assert code == 0 and f"found True {raised if is_permitted() else usual}" in output, output


SHARED_CORES = """
import os
import npu_bridge.npu_init
from npu_bridge import collective
import horovod.tensorflow as hvd, tensorflow as tf

collective.current()
for thread in os.listdir("/proc/self/task"):
    os.sched_setaffinity(int(thread), sorted(os.sched_getaffinity(0))[:2])
parts = [hvd.reducescatter(tf.ones([1000]), op=hvd.Sum, name=f"part_{number}") for number in range(100)]
print("parts", *{float(part[0]) for part in parts})
"""


@pytest.mark.slow("four ranks share two cores")
@needs_horovod
@pytest.mark.ranks(4)
def test_threads_of_ranks_that_share_cores_take_turns(tmp_path, monkeypatch):
    write_script(tmp_path, SHARED_CORES)
    monkeypatch.setenv("NPU_COMMUNICATION_PRIORITY", "1")
    code, output = npu_run("-np", 4, "--stall-secs", 120, "train.py", cwd=tmp_path)
    assert code == 0 and "parts 4.0" in output, output


@pytest.mark.parametrize(
    ("switch", "address", "is_raised"), [("", "127.0.0.1", False), ("1", "127.0.0.1", True), ("1", "", False)]
)
def test_it_is_done_under_gloo_where_it_is_asked_for(monkeypatch, switch, address, is_raised):
    monkeypatch.setattr(thread_priority, "_noted", set())
    monkeypatch.setenv("NPU_COMMUNICATION_PRIORITY", switch)
    monkeypatch.setenv("HOROVOD_GLOO_RENDEZVOUS_ADDR", address)
    monkeypatch.setenv("HOROVOD_GLOO_RENDEZVOUS_PORT", "1" if address else "")
    is_over = threading.Event()
    thread = threading.Thread(target=is_over.wait)
    with give_new_threads_real_time_priority():
        thread.start()
    try:
        expected = REAL_TIME if is_raised and is_permitted() else os.SCHED_OTHER
        assert os.sched_getscheduler(thread.native_id) == expected
    finally:
        is_over.set()
        thread.join()


def test_a_value_that_is_no_switch_is_refused(monkeypatch):
    monkeypatch.setenv("NPU_COMMUNICATION_PRIORITY", "high")
    with pytest.raises(ValueError, match="NPU_COMMUNICATION_PRIORITY has an unknown value.*0 or 1.*'high'"):
        environment.are_horovod_threads_preferred()
