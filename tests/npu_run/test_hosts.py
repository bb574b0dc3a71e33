"""Where ranks go: the four ways to say it, and what contradicts it."""

from __future__ import annotations

import json
import os
import socket
import time

import pytest

from npu_bridge.base.address import address_towards
from npu_run.errors import LaunchError
from npu_run.job.hosts import JobPlan, is_this_machine, plan_job
from npu_run.job.slots import _slots_in_order as slots_in_order
from npu_run.job.slots import find_peer
from tests.refusing import refuses

FAR = "192.0.2.7"  # an address of documentation: no host has it


@pytest.fixture(autouse=True)
def clean_environment(monkeypatch):
    """Nothing in the environment describes ranks, and what a plan writes there goes away again."""
    for name in ("RANK_ID", "RANK_SIZE", "RANK_TABLE_FILE", "CM_WORKER_SIZE", "CM_CHIEF_IP", "HOROVOD_RANK"):
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)


def write_table(folder, servers):
    """Writes a rank table from a list of (server, [(rank, device), ...])."""
    content = {"status": "completed", "version": "1.0", "server_count": str(len(servers)), "server_list": []}
    for server, placements in servers:
        devices = [{"rank_id": str(rank), "device_id": str(device)} for rank, device in placements]
        content["server_list"].append({"server_id": server, "device": devices})
    path = folder / "table.json"
    path.write_text(json.dumps(content))
    return str(path)


def test_one_local_rank_is_the_default():
    assert plan_job(None) == JobPlan(1, {})
    assert plan_job(3) == JobPlan(3, {})
    assert plan_job(3).is_local


def test_names_of_this_machine():
    assert all(map(is_this_machine, ["localhost", "127.0.0.1", "127.0.0.9", socket.gethostname()]))
    assert not is_this_machine(FAR)
    assert not is_this_machine("no such host")


def test_another_host_hears_of_an_address_of_this_machine_and_not_of_localhost():
    plan = JobPlan(3, {"localhost": 1, FAR: 2})
    assert find_peer(plan, FAR) == (address_towards(FAR) or "localhost")
    assert find_peer(JobPlan(2, {FAR: 1, "192.0.2.8": 1}), FAR) == "192.0.2.8"


def test_the_user_in_the_name_of_a_host_does_not_hide_the_route():
    assert address_towards("me@127.0.0.1") == address_towards("127.0.0.1") == "127.0.0.1"


def test_hosts_and_hostfile_say_the_same(tmp_path):
    file = tmp_path / "hosts"
    file.write_text(f"# two of them\n{FAR} slots=4\n\n  192.0.2.8 : 2   # the small one\n")
    expected = JobPlan(6, {FAR: 4, "192.0.2.8": 2})
    assert plan_job(None, hosts=f"{FAR}:4,192.0.2.8:2") == expected
    assert plan_job(None, hostfile=str(file)) == expected
    assert expected.hosts == f"{FAR}:4,192.0.2.8:2"
    assert not expected.is_local
    assert plan_job(5, hostfile=str(file)).size == 5


def test_rank_table_gives_hosts_devices_and_its_own_path_to_the_ranks(tmp_path, monkeypatch):
    path = write_table(tmp_path, [("127.0.0.1", [(0, 4), (1, 5)]), ("127.0.0.2", [(2, 0)])])
    plan = plan_job(None, rank_table=path)
    assert plan == JobPlan(3, {"127.0.0.1": 2, "127.0.0.2": 1}, devices=(4, 5, 0))
    assert plan.is_local
    assert os.environ["RANK_TABLE_FILE"] == path


@pytest.mark.parametrize(
    ("line", "part"),
    [
        ("one slots=0", "hosts:1: the line is not understood"),
        ("one", "got 'one'"),
        ("one slots=1\none:2", "hosts:2: a host comes twice"),
        ("# nobody", "names no host"),
    ],
)
def test_wrong_hostfile_names_file_and_line(tmp_path, line, part):
    (tmp_path / "hosts").write_text(line)
    with pytest.raises(LaunchError, match=part):
        plan_job(None, hostfile=str(tmp_path / "hosts"))


ONE_RANK = [("127.0.0.1", [(0, 0)])]


@pytest.mark.parametrize(
    ("variables", "options", "table", "part"),
    [
        ({"RANK_SIZE": "8"}, {"size": 2}, None, "npu-run -np 8"),
        ({"RANK_SIZE": "8"}, {}, None, "npu-run -np 8"),
        ({"CM_WORKER_SIZE": "8"}, {"size": 2}, None, "npu-run -np 8"),
        ({"RANK_ID": "1"}, {"size": 2}, None, "RANK_ID=1 is set"),
        ({"NPU_COLLECTIVES": "gloo"}, {"size": 2}, None, "NPU_COLLECTIVES names no engine"),
        ({"RANK_ID": "one"}, {"size": 2}, None, "RANK_ID is not a whole number"),
        ({"CM_CHIEF_IP": "192.0.2.1"}, {"size": 2}, None, "the chief is not fully described"),
        ({"RANK_SIZE": "2", "CM_WORKER_SIZE": "2"}, {"size": 2}, None, "describe the cluster twice"),
        ({"RANK_SIZE": "2"}, {}, ONE_RANK, "RANK_SIZE differs from the table"),
        ({"CM_WORKER_SIZE": "1"}, {}, ONE_RANK, "RANK_TABLE_FILE and CM_WORKER_SIZE"),
        ({}, {"size": 2}, ONE_RANK, "which has 1 ranks"),
        ({}, {}, [("127.0.0.1", [(0, 0), (2, 1)]), (FAR, [(1, 0)])], f"Expected rank 1 on 127.0.0.1; got {FAR}"),
        ({}, {"hosts": "one:1"}, ONE_RANK, "-H and --rank-table exclude each other"),
        ({}, {"hostfile": "missing"}, None, "--hostfile missing cannot be read"),
        ({}, {"rank_table": "missing"}, None, "rank table missing: it cannot be read"),
    ],
)
def test_what_contradicts_the_plan_or_is_missing_is_refused(tmp_path, monkeypatch, variables, options, table, part):
    for name, text in variables.items():
        monkeypatch.setenv(name, text)
    if table is not None:
        options = {**options, "rank_table": write_table(tmp_path, table)}
    with pytest.raises(LaunchError, match=part):
        plan_job(**{"size": None, **options})


def test_rank_size_that_agrees_is_fine(monkeypatch):
    monkeypatch.setenv("RANK_SIZE", "2")
    assert plan_job(2).size == 2


def test_a_rank_of_another_launcher_may_start_npu_run(monkeypatch):
    for name, text in {
        "OMPI_COMM_WORLD_RANK": "1",
        "OMPI_COMM_WORLD_SIZE": "2",
        "RANK_ID": "1",
        "RANK_SIZE": "2",
    }.items():
        monkeypatch.setenv(name, text)
    assert plan_job(None).size == 1


@pytest.mark.parametrize("name", ["-oProxyCommand=touch x", "-l", "me@-oProxyCommand=x"])
@pytest.mark.parametrize("source", ["hosts", "hostfile", "rank_table"])
def test_a_host_that_ssh_would_take_for_an_option_is_refused(tmp_path, name, source):
    name = name.replace(" ", "_") if source != "rank_table" else name
    if source == "hosts":
        given = f"{FAR}:1,{name}:1"
    elif source == "hostfile":
        (tmp_path / "hosts").write_text(f"{name} slots=1\n")
        given = str(tmp_path / "hosts")
    else:
        given = write_table(tmp_path, [(name, [(0, 0)]), (FAR, [(1, 0)])])
    with pytest.raises(LaunchError, match="begins with a dash. Expected a name or an address; got '(me@)?-"):
        plan_job(None, **{source: given})


@refuses(
    LaunchError,
    (99999999999, None, "a job has too many ranks. Expected 1..32768; got 99999999999"),
    (1025, None, "a machine has too many ranks. Expected 1..1024; got 1025"),
    (None, f"{FAR}:999999999", "too many ranks"),
    (None, f"{FAR}:{'9' * 5000}", "-H is not understood"),
    (99999999999, f"{FAR}:1", "a job has too many ranks"),
)
def test_numbers_of_ranks_that_nobody_means_are_refused_before_they_cost_anything(size, hosts):
    plan_job(size, hosts)


def test_a_large_rank_table_is_planned_at_once(tmp_path):
    servers = [
        (f"192.0.2.{server}", [(server * 1000 + device, device) for device in range(1000)]) for server in range(20)
    ]
    began = time.process_time()
    plan = plan_job(None, rank_table=write_table(tmp_path, servers))
    assert (plan.size, plan.devices[-1]) == (20_000, 999)
    assert time.process_time() - began < 10  # it was 15 s, and grew with the square


def test_fewer_ranks_than_slots_fill_the_first_hosts():
    """With the places among ranks of one host, and among ranks with one local rank, that Horovod's launcher gives."""
    slots = slots_in_order(JobPlan(4, {"one": 2, "two": 1, "three": 2}))
    places = ("rank", "size", "local_rank", "local_size", "cross_rank", "cross_size", "hostname")
    assert [slot._asdict() for slot in slots] == [
        dict(zip(places, (0, 4, 0, 2, 0, 3, "one"))),
        dict(zip(places, (1, 4, 1, 2, 0, 1, "one"))),
        dict(zip(places, (2, 4, 0, 1, 1, 3, "two"))),
        dict(zip(places, (3, 4, 0, 1, 2, 3, "three"))),
    ]
