from __future__ import annotations

import copy
import json

import pytest

from npu_bridge.options.rank_table import Placement, parse_rank_table, read_rank_table
from tests.refusing import refuses


def _device(device, rank):
    return {"device_id": str(device), "device_ip": f"192.168.0.{rank}", "rank_id": str(rank)}


TWO_SERVERS = {
    "status": "completed",
    "version": "1.0",
    "server_count": "2",
    "server_list": [
        {"server_id": "b", "device": [_device(4, 3), _device(5, 2)]},
        {"server_id": "a", "device": [_device(0, 0), _device(1, 1)]},
    ],
}
SUPER_NODE = {
    "status": "completed",
    "version": "1.2",
    "server_count": "1",
    "server_list": [
        {
            "server_id": "a",
            "host_ip": "10.0.0.1",
            "device": [{**_device(0, 0), "super_device_id": "0"}, {**_device(1, 1), "super_device_id": "1"}],
        }
    ],
    "super_pod_list": [{"super_pod_id": "0", "server_list": [{"server_id": "a"}]}],
}
GROUPS = {
    "status": "completed",
    "group_count": "1",
    "group_list": [
        {
            "group_name": "g",
            "instance_count": "2",
            "device_count": "3",
            "instance_list": [
                {"pod_name": "p0", "server_id": "a", "devices": [{"device_id": "0"}, {"device_id": "1"}]},
                {"pod_name": "p1", "server_id": "b", "devices": [{"device_id": "0"}]},
            ],
        }
    ],
}


def _file(tmp_path, content):
    path = tmp_path / "table.json"
    path.write_text(json.dumps(content))
    return path


def test_two_servers_give_ranks_devices_and_local_ranks():
    table = parse_rank_table(TWO_SERVERS)
    assert table.placements == (
        Placement(0, "a", 0, 0, 2),
        Placement(1, "a", 1, 1, 2),
        Placement(2, "b", 5, 0, 2),
        Placement(3, "b", 4, 1, 2),
    )
    assert table.servers == (("a", 2), ("b", 2))


def test_super_nodes_are_read_like_servers():
    assert parse_rank_table(SUPER_NODE).servers == (("a", 2),)


def test_groups_number_ranks_in_order():
    assert [(p.rank, p.server, p.local_rank, p.pod) for p in parse_rank_table(GROUPS).placements] == [
        (0, "a", 0, "p0"),
        (1, "a", 1, "p0"),
        (2, "b", 0, "p1"),
    ]


def test_own_placement_by_rank_and_by_pod(monkeypatch):
    monkeypatch.setenv("RANK_ID", "2")
    assert parse_rank_table(TWO_SERVERS).own_placement().server == "b"
    monkeypatch.delenv("RANK_ID")
    monkeypatch.setenv("POD_NAME", "p1")
    assert parse_rank_table(GROUPS).own_placement().rank == 2


@pytest.mark.parametrize("variables", [{"RANK_ID": "4"}, {}, {"POD_NAME": "p0"}, {"POD_NAME": "nobody"}])
def test_own_placement_must_be_clear(monkeypatch, variables):
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    table = parse_rank_table(GROUPS if "POD_NAME" in variables else TWO_SERVERS)
    with pytest.raises(ValueError, match="RANK_ID"):
        table.own_placement()


def _change(path, value):
    content = copy.deepcopy(TWO_SERVERS)
    parent = content
    for step in path[:-1]:
        parent = parent[step]
    if value is None:
        del parent[path[-1]]
    else:
        parent[path[-1]] = value
    return content


_FIRST = ("server_list", 0, "device", 0)


@refuses(
    ValueError,
    ([], "JSON object"),
    (_change(("status",), "initializing"), "status"),
    (_change(("server_count",), "3"), "server_count"),
    (_change(("server_list",), None), "server_list"),
    (_change(("server_list", 0, "server_id"), "a"), "server_id"),
    (_change(("server_list", 0, "server_id"), None), "server_id"),
    (_change(("server_list", 0, "device"), None), "device"),
    (_change((*_FIRST, "rank_id"), "0"), "rank ids"),
    (_change((*_FIRST, "rank_id"), None), "rank_id"),
    (_change((*_FIRST, "device_id"), "x"), "device_id"),
    ({"status": "completed", "server_list": []}, "rank ids"),
    ({**GROUPS, "group_count": "2"}, "group_count"),
    ({"status": "completed", "group_list": [{**GROUPS["group_list"][0], "device_count": "9"}]}, "device_count"),
)
def test_malformed_table_names_the_field(content):
    parse_rank_table(content)


def test_file_named_by_the_variable(monkeypatch, tmp_path):
    assert read_rank_table() is None
    monkeypatch.setenv("RANK_TABLE_FILE", str(_file(tmp_path, TWO_SERVERS)))
    assert read_rank_table().size == 4


def test_rank_size_must_agree(monkeypatch, tmp_path):
    monkeypatch.setenv("RANK_SIZE", "8")
    with pytest.raises(ValueError, match="RANK_SIZE differs from the table. Expected 4; got 8"):
        read_rank_table(_file(tmp_path, TWO_SERVERS))


@pytest.mark.parametrize("text", [None, "{"])
def test_unreadable_file_is_a_value_error(tmp_path, text):
    path = tmp_path / "table.json"
    if text is not None:
        path.write_text(text)
    with pytest.raises(ValueError, match="cannot be read"):
        read_rank_table(path)


def test_tables_beyond_all_bounds_are_refused_with_a_short_sentence(tmp_path):
    path = tmp_path / "table.json"
    devices = [_device(0, rank) for rank in range(32_769)]
    table = {"status": "completed", "server_list": [{"server_id": "a", "device": devices}]}
    with pytest.raises(ValueError, match="too many ranks. Expected 1..32768; got more. Use fewer."):
        parse_rank_table(table)
    path.write_text(" " * (8 * 2**20) + "{}")
    with pytest.raises(ValueError, match="more than 8388608 bytes"):
        read_rank_table(path)
    devices = [_device(0, 2 * rank) for rank in range(1000)]
    table["server_list"][0]["device"] = devices
    with pytest.raises(ValueError, match="not consecutive") as caught:
        parse_rank_table(table)
    assert len(str(caught.value)) < 500
    table["server_list"][0]["device"] = [{"device_id": "9" * 5000, "rank_id": "0"}]
    with pytest.raises(ValueError, match="device_id is missing or malformed") as caught:
        parse_rank_table(table)
    assert len(str(caught.value)) < 500
