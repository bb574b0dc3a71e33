"""Groups by their rules alone: ranks are threads here, and a communicator only writes down what it is asked."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from npu_bridge.collective import groups
from npu_bridge.collective.engines.single_process import SingleProcess
from npu_bridge.collective.groups import WORLD, RankGroups
from npu_bridge.collective.rendezvous import barrier
from npu_bridge.collective.rendezvous.key_value_server import KeyValueServer


class Job:
    """Ranks that meet in this process; every rank has its own `Groups`."""

    def __init__(self, size):
        self.size = size
        self.barrier = threading.Barrier(size, timeout=300)
        self.told = [None] * size
        self.ranks = [Rank(self, rank) for rank in range(size)]
        self.groups = [RankGroups() for _ in range(size)]

    def run(self, function):
        """Calls `function(groups, rank)` for all ranks at once; gives results or errors in rank order."""

        def call(rank):
            try:
                return function(self.groups[rank], self.ranks[rank])
            except Exception as error:
                return error

        with ThreadPoolExecutor(self.size) as pool:
            return list(pool.map(call, range(self.size)))


class Rank:
    """As much of a communicator as groups need."""

    def __init__(self, job, rank):
        self.job, self.rank, self.size = job, rank, job.size
        self.members = tuple(range(job.size))
        self.opened = []

    def exchange_integers(self, numbers, meeting, what):
        self.job.told[self.rank] = [meeting, *numbers]
        self.job.barrier.wait()
        told = list(self.job.told)
        self.job.barrier.wait()
        assert {answer[0] for answer in told} == {meeting}
        return [[answer[1] + rank // 2, *answer[2:]] for rank, answer in enumerate(told)]  # two ranks to a machine

    def open_groups(self, new, meeting):
        self.opened += new
        return [Opened(members, self.rank) for members in new]


class Opened:
    def __init__(self, members, rank):
        self.members, self.size = members, len(members)
        self.rank = members.index(rank) if rank in members else None


def test_every_rank_opens_the_same_sets_in_the_same_order():
    job = Job(4)

    def create(own, world):
        own.create("data", [world.rank % 2 + 2, world.rank % 2], world)
        own.create("model", [world.rank // 2 * 2, world.rank // 2 * 2 + 1], world)
        return own.find("data", world), own.find("model", world)

    for rank, (data, model) in enumerate(job.run(create)):
        assert job.ranks[rank].opened == [(0, 2), (1, 3), (0, 1), (2, 3)]
        assert (data.members, data.rank) == ((rank % 2, rank % 2 + 2), rank // 2)
        assert (data.local_rank, data.local_size) == (0, 1)
        assert (model.local_rank, model.local_size) == (rank % 2, 2)


def test_a_set_is_opened_once_however_many_names_it_gets():
    job = Job(3)

    def create(own, world):
        if world.rank == 2:
            own.take_part_in_creation(world)
            own.take_part_in_creation(world)
            return []
        own.create("a", [0, 1], world)
        own.create("b", [1, 0], world)
        same = own.find("a", world) is own.find("b", world)
        own.destroy("a")
        return [same, own.find("b", world).members]

    assert job.run(create) == [[True, (0, 1)], [True, (0, 1)], []]
    assert [rank.opened for rank in job.ranks] == [[(0, 1)]] * 3


def test_a_group_of_all_is_the_world_and_a_group_of_one_needs_nobody():
    job = Job(2)

    def create(own, world):
        own.create("all", [1, 0], world)
        own.create("me", [world.rank], world)
        return own.find("all", world) is world, own.find("me", world).members, own.find("me", world).size

    assert job.run(create) == [(True, (0,), 1), (True, (1,), 1)]
    assert [rank.opened for rank in job.ranks] == [[], []]


def test_a_pair_is_found_by_its_members_on_both_ranks():
    job = Job(3)

    def create(own, world):
        own.create("g", [0, 2], world) if world.rank != 1 else own.take_part_in_creation(world)
        return own.find_pair(2, 0, world).members, own.find_pair(0, 1, world)

    assert job.run(create) == [((0, 2), None)] * 3


@pytest.fixture
def alone():
    return RankGroups(), SingleProcess()


def test_a_group_without_its_own_rank_is_refused_before_the_ranks_meet():
    job = Job(2)
    job.ranks[0].exchange_integers = None
    with pytest.raises(ValueError, match="create_group_of_others"):
        job.groups[0].create("other", [1], job.ranks[0])


def test_a_name_is_free_again_after_a_failed_meeting(alone):
    own, world = alone

    def fail(numbers, meeting, what):
        raise barrier.RanksMissingError("nobody came")

    world.exchange_integers = fail
    with pytest.raises(barrier.RanksMissingError):
        own.create("a", [0], world)
    with pytest.raises(ValueError, match="no group 'a'"):
        own.find("a", world)


def test_destroying_forgets_the_name_and_the_split_strategy(alone):
    own, world = alone
    own.create("a", [0], world)
    own.strategies.set_percentages("a", [100])
    own.destroy("a")
    assert own.strategies.strategy_of("a").percentages is None
    for name, text in (("a", "no group 'a'"), (WORLD, "cannot be destroyed")):
        with pytest.raises(ValueError, match=text):
            own.destroy(name)


def test_labels_are_short_and_tell_members_apart():
    def label(*members):
        communicator = SingleProcess()
        communicator.members = members
        return groups.members_label(communicator)

    assert label(0, 1, 2) == "first3"
    assert label(1, 3) == "1_3"
    assert label(0, 2) != label(1, 3)
    long = label(*range(100, 200))
    assert long.startswith("100of") and len(long) < 16
    assert long != label(*range(101, 201))


def test_ranks_that_do_not_come_are_spoken_of_and_waited_for_no_longer_than_the_limit(monkeypatch, caplog):
    monkeypatch.setenv("HCCL_CONNECT_TIMEOUT", "1")
    monkeypatch.delenv("HOROVOD_GLOO_RENDEZVOUS_ADDR", raising=False)
    never = threading.Event()
    text = "not every rank takes part in making group 'pair'.*got no call from some rank within 1 seconds"
    with pytest.raises(barrier.RanksMissingError, match=text):
        barrier.run_barrier(never.wait, "test", 0, 2, give_up=never.set, group_text="group 'pair'")
    never.set()
    (said,) = caplog.messages
    assert "making group 'pair'" in said and "no call from some rank for 0.5 of 1 seconds. Add the missing call" in said


def test_a_rank_whose_store_has_ended_is_told_that_ranks_are_missing(monkeypatch):
    server = KeyValueServer()
    location = server.listen("127.0.0.1")
    monkeypatch.setenv("HOROVOD_GLOO_RENDEZVOUS_ADDR", location.address)
    monkeypatch.setenv("HOROVOD_GLOO_RENDEZVOUS_PORT", str(location.port))
    assert barrier.run_barrier(lambda: 5, "first", 0, 2, give_up=lambda: None) == 5
    server.stop()
    text = "got no call from some rank before the job's key-value store ended"
    with pytest.raises(barrier.RanksMissingError, match=text):
        barrier.run_barrier(lambda: 5, "second", 0, 2, give_up=lambda: None)


def test_what_fails_at_a_meeting_is_raised(monkeypatch):
    monkeypatch.delenv("HOROVOD_GLOO_RENDEZVOUS_ADDR", raising=False)

    def fail():
        raise KeyError("shut down")

    with pytest.raises(KeyError, match="shut down"):
        barrier.run_barrier(fail, "test", 0, 2, give_up=fail)


def test_the_longest_time_limit_is_none_at_all(monkeypatch):
    monkeypatch.setenv("HCCL_CONNECT_TIMEOUT", str(2**63 - 1))
    monkeypatch.delenv("HOROVOD_GLOO_RENDEZVOUS_ADDR", raising=False)
    assert barrier.run_barrier(lambda: 5, "test", 0, 2, give_up=lambda: None) == 5


@pytest.mark.parametrize("text", ["soon", "0", "-3"])
def test_a_time_limit_is_a_positive_number(monkeypatch, text):
    monkeypatch.setenv("HCCL_CONNECT_TIMEOUT", text)
    with pytest.raises(ValueError, match="HCCL_CONNECT_TIMEOUT"):
        barrier.max_wait_secs()
