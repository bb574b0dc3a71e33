"""Jobs that end after a whole step, lose ranks, take ranks in, and train as if nothing had happened."""

from __future__ import annotations

import errno
import itertools
import os
import re
import signal
import subprocess
import threading
import time
from random import Random

import numpy as np
import pytest

from npu_bridge.session import GlobalBatches
from npu_bridge.session.elastic.stop_request import StopRequest
from npu_run.errors import LaunchError
from npu_run.job import elastic, stop_after_step
from npu_run.job.elastic import AvailableSlots, HostsCommand, RankBounds, determine_rank_bounds, run_elastic
from npu_run.job.hosts import JobPlan
from npu_run.job.outcome import Outcome
from npu_run.job.stop_after_step import StopAfterStep
from npu_run.job.supervisor import run_ranks
from tests.npu_run.elastic_scripts import QUICK, TRAINING, assert_alike, train_undisturbed
from tests.npu_run.launching import (
    LIMIT_SECS,
    finish,
    is_alive,
    needs_horovod,
    npu_run,
    read_until,
    start,
    wait_for,
    write_script,
)
from tests.refusing import refuses

TWO_TO_FOUR = RankBounds(least=2, most=4, wait_secs=0.0, cool_down_secs=10.0)


# Which slots there are.


def test_a_slot_that_lost_its_rank_is_left_out_for_a_while():
    members = AvailableSlots(lambda: {"a": 2, "b": 2}, TWO_TO_FOUR)
    assert members.make_plan(0.0) == JobPlan(4, {"a": 2, "b": 2})
    members.avoid_lost_slots(("b",), 1.0)
    assert members.make_plan(2.0) == JobPlan(3, {"a": 2, "b": 1})
    members.avoid_lost_slots(("b",), 3.0)  # the second time there: twice as long
    assert members.make_plan(4.0) == JobPlan(2, {"a": 2})
    assert members.make_plan(12.0) == JobPlan(3, {"a": 2, "b": 1})
    assert members.make_plan(24.0) == JobPlan(4, {"a": 2, "b": 2})


def test_too_few_slots_are_no_job():
    assert AvailableSlots(lambda: {"": 1}, TWO_TO_FOUR).make_plan(0.0) is None
    assert AvailableSlots(lambda: {"": 9}, TWO_TO_FOUR).make_plan(0.0) == JobPlan(4, {})


def test_a_job_is_stopped_only_for_slots_that_stay():
    there = {"a": 2}
    members = AvailableSlots(lambda: there, TWO_TO_FOUR)
    members.make_plan(0.0)
    for now in range(1, 39):  # comes and goes every second
        there["b"] = now % 2
        assert members.reason_to_resize(float(now)) == ""
    there["b"] = 2
    assert members.reason_to_resize(50.0) == ""
    assert members.reason_to_resize(50.0 + elastic.STEADY_SECS) == "there are slots for 4 ranks in place of 2"


def test_hosts_that_had_ranks_come_first():
    there = {}
    members = AvailableSlots(lambda: there, TWO_TO_FOUR)

    def order(now, **slots):
        there.clear()
        there.update(slots)
        plan = members.make_plan(now)
        return plan and list(plan.slots)

    assert order(0.0, a=2, b=2, c=2) == ["a", "b", "c"]  # no rank on c
    assert order(1.0, d=1, c=2, b=2) == ["b", "d", "c"]
    assert order(2.0, d=1) is None
    assert order(3.0, a=2, c=2, d=1) == ["d", "c", "a"]


def test_hosts_that_go_do_not_stop_ranks_that_run():
    there = {"a": 4}
    members = AvailableSlots(lambda: there, TWO_TO_FOUR)
    members.make_plan(0.0)
    there.clear()
    assert members.reason_to_resize(100.0) == ""


@pytest.mark.parametrize(
    ("answer", "says"),
    [
        ("exit 3", "exit code 3; no host is known yet"),
        ("echo '<html>'", "the line is not understood"),
        ("printf '%s\\n' -oProxyCommand=x:1", "begins with a dash"),
        ("echo a:99999999", "too many ranks"),
        ("sleep 600 & echo $! >> sleeper; wait", "no answer within 1 s"),
    ],
)
def test_a_command_that_names_no_hosts_is_told_once(monkeypatch, tmp_path, answer, says):
    monkeypatch.setattr(elastic, "_ANSWER_SECS", 1.0 if "sleep" in answer else LIMIT_SECS)
    monkeypatch.setattr(elastic, "_POLL_SECS", 0.01)
    told: list[str] = []
    hosts = HostsCommand(answer.replace("sleeper", str(tmp_path / "sleeper")), told.append)
    wait_for(lambda: told, "a word about it")
    time.sleep(0.2)
    assert len(told) == 1 and says in told[0], told
    assert hosts() == {}
    if "sleeper" in answer:
        wait_for(lambda: _pids_in(tmp_path / "sleeper"), "a command that is quick enough to write its number")
        first = _pids_in(tmp_path / "sleeper")[0]
        wait_for(lambda: not is_alive(first), "the end of the command")


def _pids_in(path):
    return list(map(int, path.read_text().split())) if path.exists() else []


def test_hosts_stay_when_the_command_fails_later(monkeypatch, tmp_path):
    monkeypatch.setattr(elastic, "_POLL_SECS", 0.01)
    (tmp_path / "hosts").write_text("# up\na:2\nb slots=1\n")
    told: list[str] = []
    hosts = HostsCommand(f"cat {tmp_path}/hosts", told.append)
    wait_for(lambda: hosts() == {"a": 2, "b": 1}, "the hosts")
    (tmp_path / "hosts").unlink()
    wait_for(lambda: told, "a word about it")
    assert hosts() == {"a": 2, "b": 1} and told[0].endswith("the hosts it named before stay")


def test_a_command_that_cannot_be_started_is_started_again(monkeypatch):
    start, failures, told = subprocess.Popen, [OSError(errno.EAGAIN, "no process is free")], []

    def start_later(command, **options):
        if command == "echo later:2" and failures:
            raise failures.pop()
        return start(command, **options)

    monkeypatch.setattr(elastic, "_POLL_SECS", 0.01)
    monkeypatch.setattr(subprocess, "Popen", start_later)
    hosts = HostsCommand("echo later:2", told.append)
    wait_for(lambda: hosts() == {"later": 2}, "the hosts")
    assert told == ["--hosts-from echo later:2: it cannot be started: no process is free; no host is known yet"]


# The consequences of the ways in which a job ends.


BOUNDS = RankBounds(least=2, most=4, wait_secs=0.0, cool_down_secs=1000.0)
AT_ONCE = BOUNDS._replace(cool_down_secs=0.0)
DONE, STOPPED = Outcome(0, has_failed=False), Outcome(75, has_failed=False)
RESIZED = STOPPED._replace(was_resized=True)
LOST = Outcome(137, has_failed=True, lost=("",), has_trained=True)
KILLED = LOST._replace(has_trained=False)
FAILED = Outcome(1, has_failed=True, has_trained=True)
RESUMES = "the job resumes from its last checkpoint"
NEVER = "3 starts in a row ended before any training began; given up"
ENDS = {  # how each start ends, restarts, bounds: the exit code, the size of each start, what is told
    "ranks are lost": ([LOST, LOST, DONE], 0, BOUNDS, 0, [4, 3, 2], f"1 of 4 ranks lost; {RESUMES}"),
    "too few are left": ([LOST] * 3, 0, BOUNDS, 69, [4, 3, 2], "there were fewer than 2 slots for 0 s; given up"),
    "it fails": ([FAILED], 0, BOUNDS, 1, [4], ""),
    "it fails and is restarted": ([FAILED] * 2, 1, BOUNDS, 1, [4, 4], ""),
    "ranks lose each other": (
        [FAILED._replace(was_torn=True), DONE],
        0,
        BOUNDS,
        0,
        [4, 4],
        f"connections between ranks lost; {RESUMES}",
    ),
    "it never trains": ([KILLED] * 3, 0, AT_ONCE, 137, [4] * 3, NEVER),
    "it was resized, so it has trained": ([KILLED, KILLED, RESIZED, KILLED, KILLED, DONE], 0, AT_ONCE, 0, [4] * 6, ""),
    "it is told to stop": ([STOPPED], 0, BOUNDS, 75, [4], ""),
    "it is resized": ([RESIZED, DONE], 0, BOUNDS, 0, [4, 4], ""),
}


@pytest.mark.parametrize(("ends", "restarts", "bounds", "code", "sizes", "says"), ENDS.values(), ids=ENDS)
def test_what_follows_the_end_of_a_job(ends, restarts, bounds, code, sizes, says):
    left, found, told = iter(ends), [], []

    def run(plan, why):
        found.append(plan.size)
        return next(left)

    ended = run_elastic(run, AvailableSlots(lambda: {"": 4}, bounds), bounds, restarts, told.append)
    assert (ended, found) == (code, sizes)
    if says.endswith("given up"):
        assert told[-1] == says
    else:
        assert not says or says in told


@refuses(
    LaunchError,
    ((5, 4, None, None, None, []), "--min-np 5 cannot be reached, as --max-np is 4."),
    ((5, None, 4, None, None, []), "--min-np 5 cannot be reached, as --max-np is 4."),
    ((3, 9, None, JobPlan(2, {"a": 2}), None, []), "--min-np 3 cannot be reached, as the hosts offer 2."),
    ((2, None, None, None, None, []), "Add --max-np N"),
    ((2, None, None, JobPlan(2, {"a": 2}), "hosts.sh", []), "exclude each other"),
    ((2, 4, None, None, None, ["--timeline"]), "--timeline requires a fixed number of ranks."),
)
def test_numbers_that_do_not_fit_are_refused(numbers):
    determine_rank_bounds(*numbers)


# After which step.


class Thread:
    """A rank whose steps are turns of a barrier; the link is a pair of method calls. Used as `WatchedRank` is."""

    is_running = can_stop_after_step = True

    def __init__(self, barrier, pause):
        self.request, self.begun, self.process, self.steps = StopRequest(), None, self, 0
        self.request.connect_launcher(lambda message: setattr(self, "begun", message["begun"]))
        self._barrier, self._pause = barrier, pause
        self._thread = threading.Thread(target=self._train, daemon=True)
        self._thread.start()

    def send_order(self, order):
        name, *words = order.split()
        {"hold": self.request.block_new_runs, "end_after": self.request.allow_runs_until}[name](*map(int, words))

    def has_ended(self):
        self._thread.join(20)
        return not self._thread.is_alive()

    def _train(self):
        while not self.request.is_due:
            time.sleep(self._pause.random() / 1000)
            self.request.begin_run()
            self._barrier.wait()  # as an all-reduce
            self.steps += 1
            time.sleep(self._pause.random() / 1000)


@pytest.mark.parametrize("seed", range(40))
def test_ranks_that_are_in_different_places_end_after_the_same_step(seed):
    random = Random(seed)
    barrier = threading.Barrier(3)
    ranks = [Thread(barrier, Random(random.random())) for _ in range(3)]
    stop = StopAfterStep(ranks)
    time.sleep(random.random() / 50)
    stop.request_stop(time.monotonic())
    while not stop.is_stop_announced:
        assert stop.announce_if_ready(time.monotonic())
    assert all(rank.has_ended() for rank in ranks)
    assert len({rank.steps for rank in ranks}) == 1


# Which rows.


@pytest.mark.parametrize("seed", [0, 1, 2, None])
def test_every_row_comes_once_an_epoch_with_any_ranks(seed):
    batches = GlobalBatches(rows=50, batch=24, micro=3, seed=seed)
    sizes = itertools.cycle([4, 3, 2, 8, 1, 5, 16])
    seen: list[int] = []
    for update in range(50):  # 24 epochs
        size = next(sizes)
        by_number: dict[int, list[int]] = {}
        for rank in range(size):
            runs = -(-8 // size)
            shares = itertools.islice(batches.row_numbers_of_rank(update, rank, size), runs)
            for own, numbers in enumerate(shares):
                by_number[own * size + rank] = list(numbers)
        without_share = [by_number.pop(number) for number in sorted(by_number)[8:]]
        assert sorted(by_number) == list(range(8)) and all(rows == by_number[7] for rows in without_share)
        seen += [row for number in range(8) for row in by_number[number]]
    for epoch in range(24):
        assert sorted(seen[50 * epoch : 50 * (epoch + 1)]) == list(range(50))
    assert (seen[:50] == seen[50:100]) == (seed is None)


@refuses(
    ({"rows": 0, "batch": 8}, ValueError, "rows is out of range"),
    ({"rows": 10, "batch": 8, "micro": 3}, ValueError, "micro-batches do not fill a batch"),
    ({"rows": 10, "batch": 8.0}, TypeError, "batch is not an integer"),
    ({"rows": 10, "batch": 8, "seed": -1}, ValueError, "seed is out of range"),
)
def test_batches_that_cannot_be_dealt_are_refused(arguments):
    GlobalBatches(**arguments)


def test_arrays_of_other_lengths_are_refused():
    with pytest.raises(ValueError, match="an array has another number of rows"):
        GlobalBatches(10, 5).dataset((np.zeros([10, 2]), np.zeros([9])))


# Real trainings.


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    """The weights after an undisturbed training on one rank, which is made before a case begins."""
    return train_undisturbed(tmp_path_factory.mktemp("undisturbed"))


@needs_horovod
def test_a_job_goes_on_without_a_rank_and_trains_the_same(tmp_path, undisturbed):
    """Two ranks, of which the second is killed, then one."""
    write_script(tmp_path, TRAINING)
    options = ("-np", 2, "--min-np", 1, "--cool-down", 1000)
    code, output = finish(start(*options, "train.py", "out", "1:39:9", cwd=tmp_path, prepare=QUICK))
    assert code == 0, output
    assert "rank 1 of 2 was killed by SIGKILL" in output
    assert_alike(tmp_path / "out.npz", undisturbed)


def test_a_rank_alone_ends_after_a_step_for_ranks_that_come(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    write_script(
        tmp_path,
        """
        import os
        from npu_bridge.session.elastic.stop_request import stop_request_of_process
        request = stop_request_of_process()
        with request.handle_requests(1):
            while not request.is_due and not os.path.exists("asked_often"):
                request.begin_run()
        if request.is_due:
            request.exit_after_save(1)
        """,
    )
    asked = []

    def why():
        asked.append("there are slots for 2 ranks in place of 1")
        if len(asked) > 50:
            (tmp_path / "asked_often").touch()
        return asked[0]

    assert run_ranks("train.py", [], JobPlan(1, {}), is_out_of_date=why) == Outcome(
        75, has_failed=False, was_resized=True, has_trained=True
    )


def test_a_resize_that_a_rank_does_not_answer_starts_the_job_again(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(stop_after_step, "_ANSWER_SECS", 0.5)
    write_script(
        tmp_path,
        """
        import time
        from npu_bridge.session.elastic.stop_request import stop_request_of_process
        request = stop_request_of_process()
        request.block_new_runs = lambda: None  # as if one long call of C let no other thread run
        with request.handle_requests(1):
            request.begin_run()
            time.sleep(600)
        """,
    )
    outcome = run_ranks("train.py", [], JobPlan(1, {}), is_out_of_date=lambda: "there are other slots")
    assert outcome == Outcome(75, has_failed=False, was_resized=True, has_trained=True)


def test_a_signal_while_a_job_ends_for_other_slots_lets_it_save(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    write_script(
        tmp_path,
        """
        import pathlib, time
        from npu_bridge.session.elastic.stop_request import stop_request_of_process
        request = stop_request_of_process()
        with request.handle_requests(1):
            while not request.is_due:
                request.begin_run()
            pathlib.Path("saving").touch()
            while not pathlib.Path("signalled").exists():
                time.sleep(0.01)
            time.sleep(2)  # longer than the launcher takes to stop a rank
        request.exit_after_save(1)
        """,
    )

    def send_signal():
        wait_for((tmp_path / "saving").exists, "the rank to save")
        os.kill(os.getpid(), signal.SIGTERM)
        (tmp_path / "signalled").touch()

    threading.Thread(target=send_signal).start()
    outcome = run_ranks("train.py", [], JobPlan(1, {}), is_out_of_date=lambda: "there are other slots")
    assert outcome == Outcome(75, has_failed=False, has_trained=True)


@pytest.mark.few_fast(1, "two ranks are started twice")
@needs_horovod
@pytest.mark.parametrize("size", [1, 2])
def test_a_signal_ends_a_job_after_a_whole_step(tmp_path, undisturbed, size):
    """A rank alone is a plain process that hears the signal itself; of several, the launcher hears it."""
    write_script(tmp_path, TRAINING)
    fault = f"0:40:{signal.SIGTERM.value}" if size > 1 else "0:40:-15"
    command = ("-np", size, "train.py", "out", fault)
    code, output = npu_run(*command, cwd=tmp_path)
    assert code == 75, output
    if size > 1:
        says = r"npu-run: ended after step (\d+); exit code 75\. The same command resumes from there\."
        assert 40 <= int(re.search(says, output).group(1)) < 120, output
    code, output = npu_run(*command, cwd=tmp_path)
    assert code == 0, output
    assert_alike(tmp_path / "out.npz", undisturbed)


@pytest.mark.slow("waits for ranks that hang")
def test_a_rank_that_hangs_after_its_last_step_does_not_hold_the_job(tmp_path):
    """As it closes its session, say, in an input pipeline that waits by a clock that was set back."""
    write_script(
        tmp_path,
        """
        import os, sys
        import npu_bridge.npu_init
        import tensorflow as tf
        from npu_bridge.session.elastic import stop_request
        request = stop_request.stop_request_of_process()
        with tf.Graph().as_default(), tf.compat.v1.Session() as session:
            never = tf.queue.FIFOQueue(1, tf.int32).dequeue()
            with request.handle_requests(1):
                print("trains", flush=True)
                while not request.is_due:
                    request.begin_run()
                    tf.compat.v1.Session().close()
            print("hangs", flush=True)
            session.run(never)
        """,
    )
    process = start("--min-np", 1, "-np", 1, "--stall-secs", 4, "train.py", cwd=tmp_path)
    said = read_until(process, "trains")
    process.send_signal(signal.SIGTERM)
    code, output = finish(process)
    assert code == 75, said + output
    assert re.search(r"npu-run: no progress for \d+ s: rank 0 waiting at train.py:\d+", output), output
    assert "exit code 75. The same command resumes from there" in output
