"""The hang detector: calls that do not return, seen on a thread; decided and described on plain records.

The clock is an argument.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import itertools
import linecache
import operator
import os
import re
import subprocess
import sys
import threading
import time
import weakref

import pytest

from npu_bridge.base.machine import is_installed_code
from npu_bridge.collective.rendezvous import barrier
from npu_run.job.first_failure import InputEnd, RankEnding
from npu_run.job.hang import (
    SHORT_LIMIT_SECS,
    HangDetector,
    StuckCall,
    ThreadPosition,
    describe_hang,
    find_longest_wait_start,
    find_start_of_common_wait,
)
from npu_run.rank import stuck_call
from npu_run.rank.processor_time import _horovods_thread_name, processor_secs
from npu_run.rank.stuck_call import MainThreadSampler, frames_of_threads
from tests.holding import python
from tests.npu_run.launching import LIMIT_SECS

WAITS = StuckCall(since=10.0, where="train.py:7 (session.run(step))", waits=True)
SLEEPS = StuckCall(since=5.0, where="train.py:3 (time.sleep(600))", waits=False)
RAISED = RankEnding(rank=0, when=80.0, exit_code=1, tensor="grad_w", is_secondary=True)


def test_only_waiting_inside_a_runtime_counts():
    assert find_longest_wait_start({0: None, 1: None}) is None
    assert find_longest_wait_start({0: None, 1: SLEEPS}) is None
    assert find_longest_wait_start({0: WAITS, 1: SLEEPS}) == 10.0
    assert find_longest_wait_start({0: WAITS, 1: WAITS._replace(since=8.0)}) == 8.0
    # Steps in one run: rank 1 computes, and rank 0 has waited for it since its own part was done.
    assert find_longest_wait_start({0: WAITS._replace(busy_at=30.0), 1: WAITS._replace(busy_at=90.0)}) == 30.0


def test_description_names_who_waits_for_what_and_who_is_missing():
    calls = {0: WAITS, 1: SLEEPS, 2: WAITS, 3: None, 4: None}
    text = describe_hang(calls, [RAISED, RAISED._replace(rank=2), RankEnding(5, 1.0, 0)], stopped_ranks=[4], secs=60.4)
    assert text.startswith(
        "no progress for 60 s: ranks 0, 2 waiting for grad_w at train.py:7 (session.run(step)); "
        "rank 1 missing, it stays at train.py:3 (time.sleep(600)); rank 3 missing, it is elsewhere; "
        "rank 4 missing, its process is stopped; rank 5 missing, it has ended. Usual causes: "
    )
    assert "\n" not in text
    assert "rank 0 waiting at train.py:7" in describe_hang({0: WAITS, 1: None}, [], [], 60.0)  # no tensor is known
    ends = {1: InputEnd(37, False)}
    text = describe_hang({0: WAITS, 1: WAITS}, [], [], 60.0, input_ends=ends)
    assert "rank 1 came to the end of its input after 37 steps, and is waiting at train.py:7" in text


def test_description_names_the_rank_that_is_in_its_input_pipeline_and_not_those_that_wait_for_it():
    calls = {
        0: WAITS._replace(pipeline="train.py:3"),  # it reads ahead
        1: WAITS._replace(pipeline="train.py:4"),
        2: WAITS._replace(busy_at=50.0),
        3: None,
        4: None,
        5: None,  # it had only just begun to wait
    }
    positions = {3: ThreadPosition("train.py:5 (while True:)", "train.py:5"), 4: ThreadPosition("train.py:6 (pass)")}
    positions[5] = ThreadPosition("train.py:8")
    text = describe_hang(calls, [RAISED, RAISED._replace(rank=5)], [], 60.0, positions)
    assert text.startswith(
        "no progress for 60 s: rank 0 waiting for grad_w at train.py:7 (session.run(step)); rank 1 is in its input "
        "pipeline (train.py:4); rank 2 missing, it computes inside TensorFlow at train.py:7 (session.run(step)); rank "
        "3 is in its input pipeline (train.py:5); rank 4 missing, it is at train.py:6 (pass); rank 5 "
        "waiting for grad_w at train.py:8. "
    )


@pytest.mark.parametrize(("limit", "ends"), [(None, False), (0, False), (59.0, True), (600.0, False)])
def test_a_long_wait_ends_the_job_only_where_a_limit_says_so(limit, ends):
    said = []
    detector = HangDetector(limit, said.append)
    assert [detector.is_hung({0: WAITS, 1: None}, [], [], now) for now in (70.5, 70.6)] == [ends] * 2
    # Without a limit it is said, and said once.
    assert len(said) == (0 if limit else 1)
    for line in said:
        assert line.startswith("no progress for 60 s") and "rank 0 waiting at train.py:7" in line
        assert ("until every rank has been idle for 600 s" in line) == (limit is None)
        assert line.endswith("--stall-secs N would end it.")


def test_waits_that_end_do_not_add_up():
    detector = HangDetector(5.0, pytest.fail)
    for since in range(0, 1000, 4):
        for call in (WAITS._replace(since=float(since)), None):
            assert not detector.is_hung({0: call, 1: None}, [], [], since + 4.9)
    assert detector.is_hung({0: WAITS, 1: None}, [], [], 15.0)


@pytest.mark.parametrize(
    ("stopped", "stopped_for_secs", "ends"),
    [
        ([1], 20.5, True),
        ([1], 19.0, False),
        ([], 20.5, False),
        # The whole job is paused, and will continue.
        ([0, 1], 20.5, False),
    ],
)
def test_waiting_for_a_stopped_process_ends_the_job_without_a_limit(stopped, stopped_for_secs, ends):
    detector = HangDetector(None, pytest.fail)
    calls = {0: WAITS, 1: None}
    assert not detector.is_hung(calls, stopped, [], 12.0)
    assert detector.is_hung(calls, stopped, [], 12.0 + stopped_for_secs) == ends
    never = HangDetector(0, lambda text: None)
    assert not any(never.is_hung(calls, stopped, [], secs) for secs in (12.0, 12.0 + stopped_for_secs))
    # It continues, and starts from nothing when it stops again.
    assert not detector.is_hung(calls, [], [], 33.0)
    assert not detector.is_hung(calls, stopped, [], 34.0)


def test_a_job_is_idle_when_every_rank_waits_and_none_computes():
    other = WAITS._replace(since=30.0)
    assert find_start_of_common_wait({0: WAITS, 1: other}, []) == 30.0
    assert find_start_of_common_wait({0: WAITS._replace(busy_at=40.0), 1: other}, []) == 40.0
    assert find_start_of_common_wait({0: WAITS, 1: None}, []) is None
    assert find_start_of_common_wait({0: WAITS, 1: SLEEPS}, []) is None  # a download, perhaps
    assert find_start_of_common_wait({0: WAITS, 1: None}, stopped_ranks=[1]) == 10.0
    assert find_start_of_common_wait({}, []) is None


def test_a_job_ends_in_which_all_wait_and_some_have_no_input_left():
    behind, now = {1: InputEnd(4, False)}, 10.0 + SHORT_LIMIT_SECS

    def ends(calls, limit=None, input_ends=behind, now=now):
        return HangDetector(limit, lambda text: None).is_hung(calls, [], [], now, input_ends)

    assert ends({0: WAITS, 1: WAITS})
    assert not ends({0: WAITS, 1: WAITS}, now=now - 0.5)
    assert not ends({0: WAITS._replace(busy_at=20.0), 1: WAITS})  # it computes, or saves
    assert not ends({0: WAITS._replace(pipeline="train.py:3"), 1: WAITS})  # its batches come slowly
    assert not ends({0: SLEEPS, 1: WAITS})
    assert not ends({0: WAITS, 1: WAITS}, limit=0)
    assert not ends({0: WAITS, 1: WAITS}, input_ends={0: InputEnd(4, False), **behind})  # they will meet


@pytest.mark.parametrize(
    ("limit", "secs", "busy_secs_ago", "ends"),
    [
        (None, 601.0, None, True),
        (None, 599.0, None, False),
        (None, 5000.0, 599.0, False),  # one run of a thousand steps
        (None, 5000.0, 601.0, True),
        (0, 5000.0, None, False),
    ],
)
def test_a_job_in_which_nobody_does_anything_ends_unless_told_not_to(limit, secs, busy_secs_ago, ends):
    now = 10.0 + secs
    calls = {0: WAITS._replace(busy_at=10.0 if busy_secs_ago is None else now - busy_secs_ago), 1: WAITS}
    assert HangDetector(limit, lambda text: None).is_hung(calls, [], [], now) == ends


@contextlib.contextmanager
def running(work, *arguments, release=lambda: None):
    """A thread that runs a function; in the end it is released, and waited for."""
    thread = threading.Thread(target=work, args=arguments)
    thread.start()
    try:
        yield thread
    finally:
        release()
        thread.join()


def sampled_twice(thread, line, later, meanwhile=lambda: None):
    """Samples a thread that is stuck in a line: the sampler, what it told at 102, and its news at a later time."""
    while True:
        sampler = MainThreadSampler(thread.ident)
        first, second, told = (sampler.sample(now) for now in (100.0, 101.9, 102.0))
        if told and line in told["stuck"]["where"]:
            meanwhile()
            news = sampler.sample(later)
            if news is None or news["stuck"]:  # else the thread was still on its way there
                assert first is None and second is None
                return sampler, told["stuck"], news


def test_a_thread_that_does_not_return_is_told_once_and_again_when_it_moves():
    moved, end = threading.Event(), threading.Event()

    def work():
        moved.wait()  # the reported line
        end.wait()

    with running(work, release=lambda: (moved.set(), end.set())) as thread:
        sampler, stuck, news = sampled_twice(thread, "moved.wait", 500.0)
        assert stuck["since"] == 100.0 and not stuck["waits"]
        assert re.fullmatch(r"test_hang\.py:\d+ \(moved\.wait\(\)  # the reported line\)", stuck["where"])
        # Only the processor time of other threads of this process may change.
        assert news is None or {**news["stuck"], "busy_at": 100.0} == {**stuck, "busy_at": 100.0}
        moved.set()
        news = sampler.sample(501.0)
        while news is None or news["stuck"] is not None:
            news = sampler.sample(501.0)
    assert MainThreadSampler(0).sample(1.0) is None  # a thread that is gone


def test_a_process_that_is_forked_while_frames_are_read_collects_garbage():
    with frames_of_threads():
        assert not gc.isenabled()
        child = os.fork()
        if not child:
            os._exit(3 if gc.isenabled() else 4)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 3 and gc.isenabled()


def test_repeated_calls_of_one_function_are_not_taken_for_one_that_hangs():
    def call(lock):
        lock.acquire()

    def work():
        for lock in locks:
            call(lock)

    def is_in_call(lock):
        with frames_of_threads() as frames:
            frame = frames[thread.ident]
            return frame.f_code is call.__code__ and frame.f_locals["lock"] is lock

    locks = [threading.Lock() for _ in range(20)]
    for lock in locks:
        lock.acquire()
    with running(work) as thread:
        sampler = MainThreadSampler(thread.ident)
        news = []
        for number, lock in enumerate(locks):
            while not is_in_call(lock):
                time.sleep(0)
            news.append(sampler.sample(10.0 * number))
            lock.release()
    assert news == [None] * 20


def test_waiting_in_tensorflow_is_recognised_and_so_is_computing():
    module, generated = {"__name__": "horovod.tensorflow.mpi_ops"}, {"__name__": "d41d8cd98f00b204e9800998ecf8427e"}
    exec(compile("def call(event):\n    event()\n", "runtime.py", "exec"), module)
    exec("def call(event):\n    event()\n", generated)  # an operator's function, which TensorFlow has written
    lock = threading.Lock()
    lock.acquire()
    call = functools.partial(generated["call"], lock.acquire)
    with running(module["call"], call, release=lock.release) as thread:
        _, stuck, news = sampled_twice(thread, "runtime.py", 105.0, meanwhile=lambda: compute(0.3))
        assert stuck["waits"] and stuck["busy_at"] == 100.0
        assert news["stuck"]["busy_at"] == 105.0


def test_a_rank_that_frees_an_iterator_of_keras_waits_for_no_rank():
    """TensorFlow can take up to a minute for it; then the rank continues."""
    module, lock = {"__name__": "keras.src.backend.tensorflow.trainer"}, threading.Lock()
    exec(compile("def fit(free):\n    free()\n", "trainer.py", "exec"), module)
    lock.acquire()
    with running(module["fit"], lock.acquire, release=lock.release) as thread:
        assert not sampled_twice(thread, "trainer.py", 105.0)[1]["waits"]


@pytest.mark.slow("a start for one kind of wait")
def test_a_rank_that_frees_garbage_inside_tensorflow_waits_for_no_rank():
    """Garbage can hold iterators; see the case above."""

    class FreeingWaits(weakref.ref):
        acquire = None

    class Garbage:
        pass

    begin, free = threading.Lock(), threading.Lock()
    begin.acquire()
    free.acquire()
    garbage = Garbage()
    garbage.itself = garbage
    reference = FreeingWaits(garbage, operator.methodcaller("acquire"))  # no code in Python runs while it waits
    reference.acquire = free.acquire
    del garbage
    module = {"__name__": "tensorflow.python.eager.execute"}
    exec(compile("def trace(begin, collect):\n    begin()\n    collect()\n", "tracing.py", "exec"), module)
    with running(module["trace"], begin.acquire, gc.collect) as thread:
        sampler = MainThreadSampler(thread.ident)
        begin.release()
        try:
            while not sampler._is_collecting:
                time.sleep(0)
            stuck = [sampler.sample(now) for now in (100.0, 102.0)][1]["stuck"]
            assert "tracing.py" in stuck["where"] and not stuck["waits"]
        finally:
            free.release()
            sampler.end()


def test_waiting_for_ranks_that_make_no_group_is_recognised(monkeypatch):
    monkeypatch.delenv("HOROVOD_GLOO_RENDEZVOUS_ADDR", raising=False)
    come = threading.Event()

    def make_group():
        barrier.run_barrier(come.wait, "create_group_0", 0, 2, give_up=come.set)

    with running(make_group, release=come.set) as thread:
        assert sampled_twice(thread, "barrier.run_barrier(come.wait", 105.0)[1]["waits"]


def compute(secs):
    end = time.thread_time() + secs
    while time.thread_time() < end:
        pass


def test_where_a_thread_is_without_waiting_for_it_to_be_stuck():
    end = threading.Event()

    def _call_input_fn():  # as an Estimator calls it
        while not end.is_set():
            pass

    with running(_call_input_fn, release=end.set) as thread:
        position = MainThreadSampler(thread.ident).position()
        while "test_hang" not in position["pipeline"]:
            position = MainThreadSampler(thread.ident).position()
        assert re.fullmatch(r"test_hang\.py:\d+", position["pipeline"])
        assert position["where"].startswith(position["pipeline"].partition(":")[0])
    assert MainThreadSampler(0).position() == {"where": "", "pipeline": ""}


def test_sampling_keeps_no_object_of_a_function_that_returns():
    """A graph that a generator has entered, for example, can be left only by the thread that entered it."""
    sampler, deleted_by = MainThreadSampler(threading.get_ident()), []

    class Local:
        def __del__(self):
            deleted_by.append(threading.get_ident())

    def call():
        local = Local()
        for _ in range(2):
            thread = threading.Thread(target=lambda: sampler.sample(time.monotonic()))
            thread.start()
            thread.join()
        return local is not None

    try:
        assert call() and deleted_by == [threading.get_ident()]
    finally:
        sampler.end()


GARBAGE = """
import gc, sys, threading, traceback
from npu_run.rank.stuck_call import MainThreadSampler

class Garbage:
    def __init__(self):
        self.itself, self.local = self, threading.local()
        self.local.value = 1

def sample(number):
    kept = [[] for _ in range(number % 13)]  # so that collecting begins here, and there
    Garbage()
    sampler.sample(float(number))
    assert gc.isenabled()

def note_collection(phase, info):
    callers = {frame.f_code.co_name for frame, _ in traceback.walk_stack(sys._getframe(1))}
    disturbed.append("_sample_frames" in callers)

disturbed = []
gc.callbacks.append(note_collection)
gc.set_threshold(10)
sampler = MainThreadSampler(threading.get_ident())
for number in range(5000):
    sample(number)
gc.disable()
sampler.sample(5000.0)
assert not gc.isenabled()
assert disturbed and not any(disturbed)  # the frames of another thread can be gone after a collection
"""


def test_a_rank_that_is_looked_at_while_it_has_garbage_does_not_wait_for_itself():
    """A graph of TensorFlow is garbage of this kind; it is collected at any time."""
    assert python(GARBAGE).wait(LIMIT_SECS) == 0


ORDERS = """
import os, socket, sys, threading, types
from npu_run.rank.link import RankLink

threading.excepthook = lambda error: os._exit(9)
sys.modules["horovod.tensorflow"] = types.ModuleType("another thread is loading it")
launcher, rank = socket.socketpair()
link = RankLink(rank.detach())
launcher.sendall(b"%s\\nhold\\n" % sys.argv[1].encode())
text = b""
while b"begun" not in text:
    text += launcher.recv(4096)
assert link.has_left_horovod == (sys.argv[1] == "leave")
"""


@pytest.mark.parametrize(("order", "says"), [("leave", ""), ("end_after nonsense", "ValueError: invalid literal")])
def test_a_rank_obeys_the_orders_after_one_that_it_cannot_carry_out(order, says):
    with python(ORDERS, order, stderr=subprocess.PIPE) as process:
        error = process.communicate()[1]
    assert process.returncode == 0 and says in error and bool(says) == bool(error), error


def test_a_rank_collects_garbage_while_sources_and_threads_of_a_stuck_call_are_looked_at(monkeypatch):
    seen, lock = {}, threading.Lock()
    for module, name, result in (
        (linecache, "getline", ""),
        (stuck_call, "processor_secs", 0.0),
        (stuck_call, "is_process_blocked", False),
    ):

        def read(*arguments, name=name, result=result):
            seen[name] = seen.get(name, True) and gc.isenabled()
            return result

        monkeypatch.setattr(module, name, read)
    lock.acquire()
    with running(lock.acquire, release=lock.release) as thread:
        sampler = MainThreadSampler(thread.ident)
        for now in itertools.count(0.0, 10.0):
            sampler.sample(now)
            if len(seen) == 3:
                break
    sampler.end()
    assert all(seen.values()), seen


BLOCKED = """
import subprocess, sys, threading, time
from npu_run.rank.processor_time import _horovods_thread_name, is_process_blocked

def cycle():
    while True:
        time.sleep(0.001)

def compute():
    while True:
        sum(range(1000))

def work_by_turns():  # one thread computes while the other waits for it
    turns = [threading.Lock(), threading.Lock()]
    turns[1].acquire()

    def take(own):
        while True:
            turns[own].acquire()
            sum(range(100000))
            turns[1 - own].release()

    threading.Thread(target=take, args=[0], daemon=True).start()
    take(1)

others = {
    "waits for ever": lambda: held.acquire(),
    "frees an object": lambda: held.acquire(),
    "sleeps": lambda: time.sleep(600),
    "waits for a while": lambda: threading.Event().wait(600),
    "reads": lambda: sys.stdin.read(),
    "computes": compute,
    "works by turns": work_by_turns,
    "has a child": lambda: (subprocess.Popen(["sleep", "600"], stdin=subprocess.DEVNULL), held.acquire()),
}
held = threading.Lock()
held.acquire()
with _horovods_thread_name():
    threading.Thread(target=cycle, daemon=True).start()
threading.Thread(target=others[sys.argv[1]], daemon=True).start()

def look():
    time.sleep(0.3)
    is_wait = sys.argv[1] != "frees an object"
    print(sum(is_process_blocked(dict.fromkeys(sys._current_frames(), is_wait)) for _ in range(5)), flush=True)
    held.release()

threading.Thread(target=look).start()
held.acquire()
"""


@pytest.mark.skipif(not os.path.exists("/proc/self/syscall"), reason="the system does not say what threads wait for")
@pytest.mark.parametrize(
    ("other", "found"),
    [
        ("waits for ever", {5}),
        ("frees an object", {0}),
        ("sleeps", {0}),
        ("waits for a while", {0}),
        ("reads", {0}),
        ("computes", {0}),
        ("works by turns", {0, 1, 2, 3}),
        ("has a child", {0}),
    ],
)
def test_a_process_is_blocked_when_nothing_in_it_can_go_on(other, found):
    with python(BLOCKED, other, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert int(process.stdout.readline()) in found
        process.kill()


def test_a_job_is_over_at_once_when_every_rank_is_blocked():
    blocked = WAITS._replace(is_blocked=True)

    def ends(calls, stopped=(), limit=None):
        return HangDetector(limit, pytest.fail).is_hung(calls, stopped, [], 20.0)

    assert ends({0: blocked, 1: blocked})
    assert ends({0: blocked, 1: blocked._replace(waits=False)})  # it waits for a thread of its own that trains
    assert not ends({0: blocked, 1: WAITS}) and not ends({0: blocked, 1: None}) and not ends({})
    assert not HangDetector(None, pytest.fail).is_hung({0: blocked}, [], [RAISED], 20.0)  # the other one has ended
    assert not ends({0: blocked, 1: blocked}, limit=0) and not ends({0: blocked, 1: blocked}, stopped=[1])
    assert "They wait in different places" in describe_hang({0: blocked, 1: blocked}, [], [], 12.0)


def test_processor_time_is_that_of_all_threads_but_horovods():
    def work():
        compute(0.3)
        done.set()
        stop.wait()

    for named, least, most in ((contextlib.nullcontext, 0.25, 9.0), (_horovods_thread_name, -9.0, 0.15)):
        done, stop = threading.Event(), threading.Event()
        before = processor_secs()
        with named():
            thread = threading.Thread(target=work)
            thread.start()
        done.wait()
        assert least <= processor_secs() - before <= most
        stop.set()
        thread.join()


def test_a_script_beside_its_virtual_environment_is_no_installed_code():
    assert not is_installed_code(os.path.join(sys.prefix, "model.py"))
    assert is_installed_code(os.__file__) and is_installed_code(pytest.__file__)
