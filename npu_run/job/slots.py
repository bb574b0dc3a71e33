"""Gives each rank its host and slot there, and runs the key-value server through which ranks find each other."""

from __future__ import annotations

import collections
import contextlib
import functools
import socket
from collections.abc import Iterator
from typing import NamedTuple

from npu_bridge.base import environment
from npu_bridge.base.address import address_towards, find_interface
from npu_bridge.base.install import FIX_HOROVOD, INSTALL_HOROVOD
from npu_bridge.collective.engines import engine_of_ranks
from npu_bridge.collective.rendezvous.key_value_server import KeyValueServer
from npu_run.errors import LaunchError
from npu_run.job.hosts import JobPlan, has_address_here, is_this_machine
from npu_run.remote.tasks import ConnectedTasks

_LOCAL = "127.0.0.1"


class Slot(NamedTuple):
    """The place of a rank in a job.

    Attributes:
      rank: number of the rank.
      host: the host to reach through ssh, or the task that runs the rank; "" for this machine or this task.
      variables: environment variables by which the rank finds its peers.
    """

    rank: int
    host: str
    variables: dict[str, str]


class _AssignedSlot(NamedTuple):
    """A slot of a host that is assigned to a rank; the fields are the rank's variables `HOROVOD_...`.

    Among the ranks with the same local rank, one of each host, `cross_rank` counts in the order of the hosts.
    """

    rank: int
    size: int
    local_rank: int
    local_size: int
    cross_rank: int
    cross_size: int
    hostname: str


@contextlib.contextmanager
def connect_slots(
    plan: JobPlan, tasks: ConnectedTasks | None = None
) -> Iterator[tuple[list[Slot], KeyValueServer | None]]:
    """Yields the slots of a plan's ranks; for several ranks also runs a key-value server during the block.

    The server listens only on the addresses of this machine that the ranks use: on 127.0.0.1 if all ranks run here.

    Args:
      plan: the plan of the job.
      tasks: the tasks of a cluster, each of which runs a rank; None if this process starts the ranks.
    Yields:
      A slot for each rank, in order, and the server. A single rank on this machine has no variables and no server, and
      needs no Horovod. Other hosts choose their network interface for Gloo themselves.
    Raises:
      LaunchError: Horovod is chosen and not installed, or this machine has no address for its ranks.
    """
    if plan.size == 1 and plan.is_local:
        yield [Slot(0, "", {})], None
        return
    is_horovod = engine_of_ranks.choose_engine() == "horovod"
    if is_horovod:
        _check_horovod(plan.size)
    server = KeyValueServer()
    try:
        slots: list[Slot] = []
        name = socket.gethostname()
        ways = [] if tasks is None else tasks.network_places(plan.size)
        way_to = functools.cache(functools.partial(_route_to_host, plan))
        check_addresses = functools.cache(functools.partial(_check_addresses, name))
        for slot in _slots_in_order(plan):
            host, address, interface = ways[slot.rank] if ways else way_to(slot.hostname)
            if is_horovod and not host:
                check_addresses(address, interface)
            # Without a known route (a name that only ssh can resolve), the server listens on every interface.
            location = server.listen(address) if address else server.listen("", name=name)
            variables = {f"HOROVOD_{field.upper()}": str(value) for field, value in slot._asdict().items()}
            variables["HOROVOD_GLOO_RENDEZVOUS_ADDR"] = location.address
            variables["HOROVOD_GLOO_RENDEZVOUS_PORT"] = str(location.port)
            if is_horovod:
                variables |= {"HOROVOD_CONTROLLER": "gloo", "HOROVOD_CPU_OPERATIONS": "gloo"}
            if is_horovod and interface:
                variables |= {"HOROVOD_GLOO_IFACE": interface, "NCCL_SOCKET_IFNAME": interface}
            slots.append(Slot(slot.rank, host, variables))
        yield slots, server
    finally:
        server.stop()


def find_peer(plan: JobPlan, host: str) -> str:
    """Returns a host of other ranks, by a name or address that `host` can reach; `host` if it has all ranks."""
    peer = next((other for other in plan.slots if other != host), host)
    return (is_this_machine(peer) and address_towards(host)) or peer  # localhost is another machine there


def _check_horovod(size: int) -> None:
    """Raises LaunchError if Horovod cannot be imported; a broken installation can raise any error."""
    try:
        import horovod  # noqa: F401
    except Exception as error:
        raise LaunchError(
            f"{size} ranks need Horovod, which cannot be imported ({error}). Install it (needs g++, cmake): "
            f"{FIX_HOROVOD}; or by hand: {INSTALL_HOROVOD}"
        ) from error


def _slots_in_order(plan: JobPlan) -> list[_AssignedSlot]:
    """Returns a slot for each rank of a plan: ranks fill one host after the other."""
    places: list[tuple[str, int]] = []
    counts: dict[str, int] = {}
    cross_ranks: dict[int, dict[str, int]] = collections.defaultdict(dict)
    for host, slots in ({"localhost": plan.size} if plan.is_local else plan.slots).items():
        counts[host] = min(slots, plan.size - len(places))
        for local in range(counts[host]):
            places.append((host, local))
            cross_ranks[local][host] = len(cross_ranks[local])
    return [
        _AssignedSlot(rank, plan.size, local, counts[host], cross_ranks[local][host], len(cross_ranks[local]), host)
        for rank, (host, local) in enumerate(places)
    ]


def _check_addresses(name: str, address: str, interface: str) -> None:
    """Raises LaunchError if this machine lacks the addresses that Gloo needs for ranks here."""
    if not has_address_here(name):  # Gloo crashes without such an address, on any interface
        raise LaunchError(
            f"Horovod cannot find this machine by name. Expected an address for the name {name}; got none. Add a line "
            f"to /etc/hosts: 127.0.0.1 {name}"
        )
    if address == _LOCAL and not interface:
        raise LaunchError(f"no network interface that is up has the address {address}. Bring one up: ip link set lo up")


def _route_to_host(plan: JobPlan, name: str) -> tuple[str, str, str]:
    """Returns how ranks on a host reach the server: the host's name, the server's address, and the network interface.

    The name is "" for this machine; the interface is "" on another host.
    """
    if not plan.is_local and not is_this_machine(name):
        return name, address_towards(name), ""
    if not plan.is_local:
        address = address_towards(next(other for other in plan.slots if not is_this_machine(other)))
        return "", address, environment.read_variable("HOROVOD_GLOO_IFACE") or find_interface(address)
    return "", _LOCAL, find_interface(_LOCAL)
