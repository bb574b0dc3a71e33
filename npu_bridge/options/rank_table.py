"""Reads rank tables: JSON files that list the server and the device of each rank.

Three forms are read: version 1.0 (`server_list`), version 1.2 for super-nodes (`server_list` with more fields), and an
older form with groups (`group_list`), in which the order of the entries determines the ranks. Unknown fields and
addresses are ignored; Horovod finds addresses itself.
"""

from __future__ import annotations

import collections
import os
from typing import Any, NamedTuple

from npu_bridge.base import environment
from npu_bridge.base.reading import parse_json, read_text

# The documented maximum number of ranks, and a file size that is enough to list them.
MOST_RANKS = 32768
_MOST_BYTES = 8 * 2**20
_LONGEST_QUOTE = 120


class Placement(NamedTuple):
    """The place of one rank in a rank table.

    Attributes:
      rank: global rank.
      server: id of the rank's server.
      device: number of the device on the server.
      local_rank: position among the ranks of the server.
      local_size: number of ranks on the server.
      pod: name of the pod in the older form, else "".
    """

    rank: int
    server: str
    device: int
    local_rank: int
    local_size: int
    pod: str = ""


class RankTable(NamedTuple):
    """A rank table: the places of all ranks, in rank order."""

    placements: tuple[Placement, ...]

    @property
    def size(self) -> int:
        """Number of ranks."""
        return len(self.placements)

    @property
    def servers(self) -> tuple[tuple[str, int], ...]:
        """Each server with its number of ranks, ordered by the first rank of each server: the hosts for Horovod."""
        return tuple({p.server: p.local_size for p in self.placements}.items())

    def own_placement(self) -> Placement:
        """Returns this process's placement, found by `RANK_ID`, else by `POD_NAME`; else the table's only placement.

        Raises:
          ValueError: the process is not in the table, or neither variable identifies its rank.
        """
        rank, pod = environment.declared_rank(), environment.read_variable("POD_NAME")
        if rank is not None:
            if rank < self.size:
                return self.placements[rank]
            fix = "Correct RANK_ID or the table"
            raise _error("rank table", "RANK_ID is not in the table", f"0..{self.size - 1}", str(rank), fix)
        in_pod = [p for p in self.placements if pod is not None and p.pod == pod]
        if len(in_pod) == 1:
            return in_pod[0]
        if self.size == 1:
            return self.placements[0]
        expected, got = f"RANK_ID in 0..{self.size - 1}", f"none, and POD_NAME={pod!r} names {len(in_pod)} ranks"
        raise _error(
            "rank table",
            "neither RANK_ID nor POD_NAME identifies the rank of this process",
            expected,
            got,
            "Set RANK_ID",
        )


def read_rank_table(path: str | os.PathLike | None = None) -> RankTable | None:
    """Reads a rank table, and checks that it is consistent and fits `RANK_SIZE`.

    Args:
      path: the file; by default the file that `RANK_TABLE_FILE` names.
    Returns:
      The table, or None when no path is given and `RANK_TABLE_FILE` is unset.
    Raises:
      ValueError: the file cannot be read, is not JSON, is not completed, is inconsistent, or contradicts `RANK_SIZE`.
    """
    chosen = path if path is not None else environment.read_variable("RANK_TABLE_FILE")
    if chosen is None:
        return None
    where = f"rank table {os.fspath(chosen)}"
    try:
        content = parse_json(read_text(chosen, max_bytes=_MOST_BYTES).removeprefix("\ufeff"))
    except (OSError, ValueError) as error:
        raise ValueError(f"{where}: it cannot be read. Expected a JSON file; got {error}. Correct the path.") from error
    table = parse_rank_table(content, where)
    declared = environment.read_variable("RANK_SIZE")
    if declared is not None and environment.declared_world_size() != table.size:
        raise _error(where, "RANK_SIZE differs from the table", f"{table.size}", declared, "Correct one of them")
    return table


def parse_rank_table(content: Any, where: str = "rank table") -> RankTable:
    """Converts the parsed JSON of a rank table into a `RankTable`.

    Args:
      content: the parsed JSON, in one of the three forms.
      where: the table's name in messages.
    Raises:
      ValueError: a field is missing or malformed, ranks are not 0..n-1, or a count is wrong.
    """
    if not isinstance(content, dict):
        raise _error(where, "the table is not an object", "a JSON object", type(content).__name__, "Correct the file")
    if content.get("status") != "completed":
        fix = "Wait until the cluster has completed it" if content.get("status") == "initializing" else "Correct it"
        raise _error(where, "status is not completed", "'completed'", repr(content.get("status")), fix)
    rows = _read_group_rows(content, where) if "group_list" in content else _read_server_rows(content, where)
    ranks = sorted(rank for rank, *_ in rows)
    if ranks != list(range(len(rows))) or not rows:
        expected = f"each of 0..{max(len(rows) - 1, 0)} once"
        raise _error(where, "rank ids are not consecutive", expected, str(ranks), "Renumber them")
    sizes = collections.Counter(server for _, server, *_ in rows)
    seen: collections.Counter = collections.Counter()
    placements = []
    for rank, server, device, pod in sorted(rows):
        placements.append(Placement(rank, server, device, seen[server], sizes[server], pod))
        seen[server] += 1
    return RankTable(tuple(placements))


def _read_server_rows(content: dict, where: str) -> list[tuple[int, str, int, str]]:
    servers = _read_list(content, "server_list", where)
    _check_count(content, "server_count", len(servers), where)
    rows, seen = [], set()
    for server in servers:
        identity = _read_text(server, "server_id", where)
        if identity in seen:
            raise _error(
                where, "server_id is not unique", "each server once", f"{identity!r} twice", "Merge both entries"
            )
        seen.add(identity)
        for device in _read_list(server, "device", where):
            rows.append(
                (_read_number(device, "rank_id", where), identity, _read_number(device, "device_id", where), "")
            )
            _check_rank_count(rows, where)
    return rows


def _read_group_rows(content: dict, where: str) -> list[tuple[int, str, int, str]]:
    groups = _read_list(content, "group_list", where)
    _check_count(content, "group_count", len(groups), where)
    rows: list[tuple[int, str, int, str]] = []
    for group in groups:
        instances = _read_list(group, "instance_list", where)
        _check_count(group, "instance_count", len(instances), where)
        before = len(rows)
        for instance in instances:
            server, pod = _read_text(instance, "server_id", where), str(instance.get("pod_name", ""))
            for device in _read_list(instance, "devices", where):
                rows.append((len(rows), server, _read_number(device, "device_id", where), pod))
                _check_rank_count(rows, where)
        _check_count(group, "device_count", len(rows) - before, where)
    return rows


def _check_rank_count(rows: list, where: str) -> None:
    if len(rows) > MOST_RANKS:
        raise _error(where, "the table has too many ranks", f"1..{MOST_RANKS}", "more", "Use fewer ranks")


def _read_list(parent: Any, field: str, where: str) -> list:
    value = parent.get(field) if isinstance(parent, dict) else None
    if not isinstance(value, list) or not all(isinstance(item, dict) for item in value):
        raise _error(where, f"{field} is missing or malformed", "an array of objects", repr(value), f"Correct {field}")
    return value


def _read_text(parent: dict, field: str, where: str) -> str:
    value = parent.get(field)
    if not isinstance(value, str) or not value:
        raise _error(where, f"{field} is missing or malformed", "a non-empty string", repr(value), f"Correct {field}")
    return value


def _read_number(parent: dict, field: str, where: str) -> int:
    value = str(parent.get(field))
    if not value.isdecimal() or len(value) > 18:
        raise _error(where, f"{field} is missing or malformed", 'digits such as "0"', repr(value), f"Correct {field}")
    return int(value)


def _check_count(parent: dict, field: str, true_count: int, where: str) -> None:
    if field in parent and str(parent[field]) != str(true_count):
        raise _error(
            where,
            f"{field} is not the number of entries",
            str(true_count),
            repr(parent[field]),
            "Correct the count or the list",
        )


def _error(where: str, problem: str, expected: str, got: str, fix: str) -> ValueError:
    got = got if len(got) <= _LONGEST_QUOTE else f"{got[:_LONGEST_QUOTE]}..."
    return ValueError(f"{where}: {problem}. Expected {expected}; got {got}. {fix}.")
