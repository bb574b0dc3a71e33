"""Reads how many ranks each host of a job gets: from the command line, a file or a rank table; else all here."""

from __future__ import annotations

import contextlib
import os
import re
import socket
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from npu_bridge.base import environment
from npu_bridge.base.gpus import usable_gpus
from npu_bridge.base.reading import read_text
from npu_bridge.options.rank_table import MOST_RANKS, RankTable, read_rank_table
from npu_run.errors import LaunchError

# Longer numbers are mistakes, and Python refuses to read very long ones.
_HOSTS = re.compile(r"[^\s:,]+:[1-9]\d{0,8}(,[^\s:,]+:[1-9]\d{0,8})*")
_HOSTFILE_LINE = re.compile(r"(?P<host>[^\s:,]+)(?:\s*:\s*|\s+slots\s*=\s*)(?P<slots>[1-9]\d{0,8})")
# A rank takes some hundred megabytes and a dozen threads: more ranks on one machine are a typing error.
MOST_RANKS_OF_A_HOST = 1024
_LONGEST_QUOTE = 200


class JobPlan(NamedTuple):
    """The plan of a job before it starts.

    Attributes:
      size: number of ranks.
      slots: number of ranks by host, in the order in which hosts are filled; empty for this machine alone.
      devices: device of each rank, if a rank table lists devices.
    """

    size: int
    slots: Mapping[str, int]
    devices: tuple[int, ...] = ()

    @property
    def is_local(self) -> bool:
        """Whether all ranks run on this machine."""
        return all(map(is_this_machine, self.slots))

    @property
    def hosts(self) -> str:
        """The hosts in the format of `-H`."""
        return ",".join(f"{host}:{slots}" for host, slots in self.slots.items())


def plan_job(
    size: int | None, hosts: str | None = None, hostfile: str | None = None, rank_table: str | None = None
) -> JobPlan:
    """Makes a plan from options of the command line, and checks it against the environment.

    Sets RANK_TABLE_FILE for this process, and so for every rank, if a rank table is given. If the options name ranks or
    hosts, removes the variables of another job from the environment.

    Args:
      size: number of ranks; None means all named slots or, without hosts, one rank.
      hosts: the value of -H.
      hostfile: a file with a line `host slots=N` (or `host:N`) for each host.
      rank_table: a rank table in JSON.
    Raises:
      LaunchError: the sources exclude each other, cannot be read, offer too few slots, name too many ranks, name a host
        that ssh would take for an option, or contradict RANK_ID, RANK_SIZE, a device or the CM_* variables.
    """
    named = [name for name, given in (("-H", hosts), ("--hostfile", hostfile), ("--rank-table", rank_table)) if given]
    if len(named) > 1:
        raise LaunchError(f"{' and '.join(named)} exclude each other. Name the hosts in one way.")
    if rank_table:
        plan = _plan_from_table(size, rank_table)
    else:
        slots = _read_hostfile(hostfile) if hostfile else _parse_slots(hosts)
        plan = JobPlan(size or sum(slots.values()) or 1, slots)
    _check_plan_size(plan)
    if plan.slots and plan.size > sum(plan.slots.values()):
        source = f"-H {hosts}" if hosts else f"--hostfile {hostfile}"
        raise LaunchError(f"-np {size} is more than {source} offers. Name more slots or a smaller -np.")
    _check_host_names(plan)
    _check_environment(plan.size, is_outermost=size is None and not named)
    if not rank_table:
        _check_devices(plan.size)
    return plan


def _check_plan_size(plan: JobPlan) -> None:
    """Raises LaunchError for too many ranks, whose descriptions alone could fill the memory."""
    if plan.size > MOST_RANKS:
        raise LaunchError(f"a job has too many ranks. Expected 1..{MOST_RANKS}; got {plan.size}. Start fewer ranks.")
    most = max([*plan.slots.values()] or [plan.size])
    if most > MOST_RANKS_OF_A_HOST:
        raise LaunchError(
            f"a machine has too many ranks. Expected 1..{MOST_RANKS_OF_A_HOST}; got {most}. Start fewer "
            "ranks, or name more hosts."
        )


def _check_host_names(plan: JobPlan) -> None:
    """Raises LaunchError for host names that begin with a dash.

    Ssh would take them for options, which can run commands.
    """
    for host in plan.slots:
        if any(part.startswith("-") for part in host.split("@")):
            raise LaunchError(
                f"the name of a host begins with a dash. Expected a name or an address; got {host[:_LONGEST_QUOTE]!r}. "
                f"Correct it in -H, the hostfile or the rank table."
            )


def is_this_machine(host: str) -> bool:
    """Returns whether a name or address belongs to this machine, so that a socket can be bound to it."""
    return host in ("localhost", socket.gethostname()) or has_address_here(host)


def has_address_here(host: str) -> bool:
    """Returns whether a name resolves to an address of this machine."""
    with contextlib.suppress(OSError, UnicodeError):
        for family, _, _, _, address in socket.getaddrinfo(host, 0, type=socket.SOCK_DGRAM):
            with contextlib.suppress(OSError), socket.socket(family, socket.SOCK_DGRAM) as probe:
                probe.bind(address)
                return True
    return False


def _parse_slots(hosts: str | None) -> dict[str, int]:
    if hosts is None:
        return {}
    if not _HOSTS.fullmatch(hosts):
        got = hosts[:_LONGEST_QUOTE]
        raise LaunchError(f"-H is not understood. Expected host:slots,host:slots with slots >= 1; got {got!r}.")
    pairs = [entry.split(":") for entry in hosts.split(",")]
    if len({host for host, _ in pairs}) < len(pairs):
        got = hosts[:_LONGEST_QUOTE]
        raise LaunchError(f"-H names a host twice. Expected each host once with all its slots; got {got!r}.")
    return {host: int(slots) for host, slots in pairs}


def _read_hostfile(path: str) -> dict[str, int]:
    try:
        lines = read_text(path).splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise LaunchError(f"--hostfile {path} cannot be read ({error}). Name a text file.") from error
    slots = read_hosts(lines, path)
    if not slots:
        raise LaunchError(f"--hostfile {path} names no host. Expected lines such as host1 slots=4.")
    return slots


def read_hosts(lines: Sequence[str], source: str) -> dict[str, int]:
    """Reads the number of ranks by host from lines `host slots=N` or `host:N`, in the order of the lines.

    Args:
      lines: the lines; empty lines and text after a # are ignored.
      source: name of the lines in messages.
    Raises:
      LaunchError: a line has another form, or a host is repeated, has too many ranks, or looks like an option of ssh.
    """
    slots: dict[str, int] = {}
    for number, line in enumerate(lines, start=1):
        text = line.partition("#")[0].strip()
        if not text:
            continue
        entry = _HOSTFILE_LINE.fullmatch(text)
        if not entry or entry["host"] in slots:
            problem = "a host comes twice" if entry else "the line is not understood"
            got = text[:_LONGEST_QUOTE]
            raise LaunchError(f"{source}:{number}: {problem}. Expected each host once, as host slots=N; got {got!r}.")
        slots[entry["host"]] = int(entry["slots"])
    plan = JobPlan(sum(slots.values()), slots)
    _check_plan_size(plan)
    _check_host_names(plan)
    return slots


def _plan_from_table(size: int | None, path: str) -> JobPlan:
    try:
        table = read_rank_table(path)
    except ValueError as error:
        raise LaunchError(str(error)) from error
    if size not in (None, table.size):
        raise LaunchError(f"-np {size} differs from rank table {path}, which has {table.size} ranks. Omit -np.")
    environment.write_variable("RANK_TABLE_FILE", os.path.abspath(path))
    plan = JobPlan(table.size, dict(table.servers), tuple(placement.device for placement in table.placements))
    if not plan.is_local:
        _check_rank_order(table, path)
    return plan


def _check_rank_order(table: RankTable, path: str) -> None:
    """Raises LaunchError for a rank table that does not number its ranks host after host, as the job does."""
    filled = [server for server, slots in table.servers for _ in range(slots)]
    for placement, server in zip(table.placements, filled):
        if placement.server != server:
            raise LaunchError(
                f"rank table {path} numbers its ranks across servers. Expected rank {placement.rank} on {server}; got "
                f"{placement.server}. Number the ranks of each server in a row."
            )


def _check_devices(size: int) -> None:
    """Raises LaunchError if a variable of the caller would give all ranks the same one of several GPUs."""
    names = [name for name in environment.DEVICE_VARIABLES if environment.read_variable(name)]
    if names and size > 1 and len(usable_gpus()) > 1 and environment.launcher_placement() is None:
        raise LaunchError(
            f"{names[0]}={environment.read_variable(names[0])} is set, so every rank would use the same GPU. Unset it: "
            f"npu-run gives each rank a GPU."
        )


def _check_environment(size: int, is_outermost: bool) -> None:
    """Raises LaunchError if environment variables contradict the plan, unless another launcher has set them.

    Options that name ranks or hosts start a job of their own, also from a rank of another job.
    """
    try:
        environment.collective_engine()
        if not is_outermost:
            environment.leave_outer_job()
        placed = environment.launcher_placement()
        environment.check_cluster_variables()
        if placed is not None:
            return
        declared = environment.declared_world_size()
        if declared not in (1, size):
            raise LaunchError(
                f"RANK_SIZE (or CM_WORKER_SIZE) is {declared}, but {size} rank(s) would start. "
                f"Use npu-run -np {declared}, or unset the variable."
            )
        rank = environment.declared_rank()
        if size > 1 and rank is not None:
            raise LaunchError(f"RANK_ID={rank} is set and would be every rank's number. Unset it: npu-run sets it.")
    except ValueError as error:
        raise LaunchError(str(error)) from error
