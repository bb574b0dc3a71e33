"""Standstills: seen on a thread, decided and described on plain records. The clock is an argument."""

from __future__ import annotations

import contextlib
import io
import re
import threading
import time
import types

import pytest
from npu_bridge.launch.rank.hang_detector import Standstill

from npu_bridge.launch.job.first_failure import Ending
from npu_bridge.launch.job.hang import Place, Still, describe_stall, idle_since, waiting_since
from npu_bridge.launch.job.output import JointStream
from npu_bridge.launch.job.supervisor import _Job

WAITS = Still(since=10.0, where="train.py:7 (session.run(step))", waits=True)
SLEEPS = Still(since=5.0, where="train.py:3 (time.sleep(600))", waits=False)
RAISED = Ending(rank=0, when=80.0, exit_code=1, tensor="grad_w", is_echo=True)


def test_only_waiting_inside_a_runtime_counts():
    assert waiting_since({0: None, 1: None}) is None
    assert waiting_since({0: None, 1: SLEEPS}) is None
    assert waiting_since({0: WAITS, 1: SLEEPS}) == 10.0
    assert waiting_since({0: WAITS, 1: WAITS._replace(since=8.0)}) == 8.0


def test_description_names_who_waits_for_what_and_who_is_missing():
    stills = {0: WAITS, 1: SLEEPS, 2: WAITS, 3: None, 4: None}
    text = describe_stall(stills, [RAISED, RAISED._replace(rank=2), Ending(5, 1.0, 0)], stopped=[4], secs=60.4)
    assert text.startswith(
        "no progress for 60 s: ranks 0, 2 waiting for grad_w at train.py:7 (session.run(step)); "
        "rank 1 missing, it stays at train.py:3 (time.sleep(600)); rank 3 missing, it is elsewhere; "
        "rank 4 missing, its process is stopped; rank 5 missing, it has ended. Usual causes: "
    )
    assert "\n" not in text


def test_description_without_tensors():
    assert "rank 0 waiting at train.py:7" in describe_stall({0: WAITS, 1: None}, [], [], 60.0)


def test_a_thread_that_does_not_return_is_told_once_and_again_when_it_moves():
    moved, end = threading.Event(), threading.Event()

    def work():
        moved.wait()  # the line that is told
        end.wait()

    thread = threading.Thread(target=work)
    thread.start()
    try:
        told = None
        while not told:  # the thread may still be on its way there
            standstill = Standstill(thread.ident)
            first, second, told = (standstill.look(now) for now in (100.0, 101.9, 102.0))
        assert first is None and second is None
        still = told["still"]
        assert still["since"] == 100.0 and not still["waits"]
        assert re.fullmatch(r"test_stall\.py:\d+ \(moved\.wait\(\)  # the line that is told\)", still["where"])
        assert standstill.look(500.0) is None
        moved.set()
        news = None
        while not news:
            news = standstill.look(501.0)
        assert news == {"still": None}
    finally:
        moved.set()
        end.set()
        thread.join()


def test_repeated_calls_of_one_function_are_no_standstill():
    stop = threading.Event()
    calls, ticks = threading.Semaphore(0), threading.Semaphore(0)

    def wait_for_tick():
        calls.release()
        ticks.acquire()

    def work():
        while not stop.is_set():
            wait_for_tick()

    thread = threading.Thread(target=work)
    thread.start()
    try:
        standstill = Standstill(thread.ident)
        for now in range(20):
            calls.acquire()  # the thread is in its next call
            assert standstill.look(float(10 * now)) is None
            ticks.release()
    finally:
        stop.set()
        ticks.release()
        thread.join()


def test_waiting_in_tensorflow_is_recognised():
    code = compile("def call(event):\n    event()\n", "runtime.py", "exec")
    module = {"__name__": "tensorflow.python.client.session"}
    exec(code, module)
    lock = threading.Lock()
    lock.acquire()
    thread = threading.Thread(target=module["call"], args=(lock.acquire,))
    thread.start()
    try:
        news = None
        while not news or "runtime.py" not in news["still"]["where"]:  # the thread may still be on its way there
            standstill = Standstill(thread.ident)
            news = standstill.look(0.0) or standstill.look(9.0)
        assert news["still"]["waits"]
    finally:
        lock.release()
        thread.join()


@pytest.mark.parametrize(("limit", "ends"), [(None, False), (59.0, True), (600.0, False)])
def test_a_long_wait_ends_the_job_only_where_a_limit_says_so(limit, ends):
    since = time.monotonic() - 60.5
    errors = io.BytesIO()
    job = _Job(limit, JointStream(errors))
    job._ranks = [
        types.SimpleNamespace(rank=rank, still=still, is_running=True, is_stopped=False)
        for rank, still in enumerate([WAITS._replace(since=since), None])
    ]
    assert [job._is_stalled([]) for _ in range(2)] == [ends] * 2
    said = errors.getvalue().decode().splitlines()
    # Without a limit it is said, and said once.
    assert len(said) == (0 if limit else 1)
    for line in said:
        assert line.startswith("npu-run: no progress for 6") and "rank 0 waiting at train.py:7" in line
        assert line.endswith("--stall-secs N would end it.")


@pytest.mark.parametrize(
    ("stopped", "stopped_for_secs", "ends"),
    [
        ({1}, 20.5, True),
        ({1}, 19.0, False),
        (set(), 20.5, False),
        # Somebody has paused the whole job, and will let it go on.
        ({0, 1}, 20.5, False),
    ],
)
def test_waiting_for_a_stopped_process_ends_the_job_without_a_limit(stopped, stopped_for_secs, ends):
    now = time.monotonic()
    job = _Job(None, JointStream(io.BytesIO()))
    job._ranks = [
        types.SimpleNamespace(rank=rank, still=still, is_running=True, is_stopped=rank in stopped)
        for rank, still in enumerate([WAITS._replace(since=now - 25.0), None])
    ]
    assert not job._is_stalled([])
    job._stops = dict.fromkeys(job._stops, now - stopped_for_secs)
    assert job._is_stalled([]) == ends
    for rank in job._ranks:
        rank.is_stopped = False
    assert not job._is_stalled([])  # it goes on, and starts from nothing when it stops again


def test_a_thread_that_is_gone_has_no_news():
    assert Standstill(0).look(1.0) is None


def test_a_job_is_idle_when_every_rank_waits_and_none_computes():
    other = WAITS._replace(since=30.0)
    assert idle_since({0: WAITS, 1: other}, []) == 30.0
    assert idle_since({0: WAITS._replace(busy_at=40.0), 1: other}, []) == 40.0
    assert idle_since({0: WAITS, 1: None}, []) is None
    assert idle_since({0: WAITS, 1: SLEEPS}, []) is None  # a download, perhaps
    assert idle_since({0: WAITS, 1: None}, stopped=[1]) == 10.0
    assert idle_since({}, []) is None


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
    now = time.monotonic()
    job = _Job(limit, JointStream(io.BytesIO()))
    busy_at = now - (secs if busy_secs_ago is None else busy_secs_ago)
    stills = [WAITS._replace(since=now - secs, busy_at=busy_at), WAITS._replace(since=now - secs)]
    job._ranks = [
        types.SimpleNamespace(rank=rank, still=still, is_running=True, is_stopped=False)
        for rank, still in enumerate(stills)
    ]
    assert job._is_stalled([]) == ends


def test_description_names_the_rank_that_is_in_its_input_pipeline_and_not_those_that_wait_for_it():
    stills = {
        0: WAITS._replace(pipeline="train.py:3"),  # it reads ahead
        1: WAITS._replace(pipeline="train.py:4"),
        2: WAITS._replace(busy_at=50.0),
        3: None,
        4: None,
        5: None,  # it had only just begun to wait
    }
    places = {3: Place("train.py:5 (while True:)", "train.py:5"), 4: Place("train.py:6 (pass)"), 5: Place("train.py:8")}
    text = describe_stall(stills, [RAISED, RAISED._replace(rank=5)], [], 60.0, places)
    assert text.startswith(
        "no progress for 60 s: rank 0 waiting for grad_w at train.py:7 (session.run(step)); rank 1 is in its input "
        "pipeline (train.py:4); rank 2 missing, it computes inside TensorFlow at train.py:7 (session.run(step)); rank "
        "3 is in its input pipeline (train.py:5); rank 4 missing, it is at train.py:6 (pass); rank 5 "
        "waiting for grad_w at train.py:8. "
    )


def test_where_a_thread_is_without_waiting_for_it_to_stand_still():
    end = threading.Event()

    def _call_input_fn():  # as an Estimator calls it
        while not end.is_set():
            pass

    thread = threading.Thread(target=_call_input_fn)
    thread.start()
    try:
        place = Standstill(thread.ident).place()
        while "test_stall" not in place["pipeline"]:
            place = Standstill(thread.ident).place()
        assert re.fullmatch(r"test_stall\.py:\d+", place["pipeline"])
        assert place["where"].startswith(place["pipeline"].partition(":")[0])
    finally:
        end.set()
        thread.join()
    assert Standstill(0).place() == {"where": "", "pipeline": ""}


def test_processor_time_is_that_of_all_threads_but_horovods():
    from npu_bridge.launch.rank.processor_time import _named, processor_secs

    def compute(secs):
        end = time.thread_time() + secs
        while time.thread_time() < end:
            pass
        done.set()
        stop.wait()

    for named, least, most in ((contextlib.nullcontext, 0.25, 9.0), (_named, -9.0, 0.15)):
        done, stop = threading.Event(), threading.Event()
        before = processor_secs()
        with named():
            thread = threading.Thread(target=compute, args=(0.3,))
            thread.start()
        done.wait()
        assert least <= processor_secs() - before <= most
        stop.set()
        thread.join()
