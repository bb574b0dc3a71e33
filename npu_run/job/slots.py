"""Assigns slots to ranks with Horovod's launcher, and runs the key-value server through which ranks find each other."""

from __future__ import annotations

import contextlib
import functools
import socket
from collections.abc import Iterator
from typing import NamedTuple

from npu_bridge.base import environment, horovod_internals
from npu_bridge.base.install import FIX_HOROVOD, INSTALL_HOROVOD
from npu_bridge.collective import engine_of_ranks
from npu_bridge.collective.key_value_server import KeyValueServer
from npu_run.errors import LaunchError
from npu_run.job.hosts import Plan, has_address_here, is_this_machine
from npu_run.remote.address import address_towards, find_interface
from npu_run.remote.tasks import Tasks

_LOCAL = "127.0.0.1"


class Slot(NamedTuple):
    """The place of a rank in a job.

    Attributes:
      rank: number of the rank.
      host: the host to reach through ssh, or the task that runs the rank; "" for this machine or this task.
      variables: environment variables by which Horovod finds the rank's peers.
    """

    rank: int
    host: str
    variables: dict[str, str]


@contextlib.contextmanager
def open_slots(plan: Plan, tasks: Tasks | None = None) -> Iterator[tuple[list[Slot], KeyValueServer | None]]:
    """Yields the slots of a plan's ranks; for several ranks also runs a key-value server during the block.

    The server listens only on the addresses of this machine that the ranks use: on 127.0.0.1 if all ranks run here.

    Args:
      plan: the plan of the job.
      tasks: the tasks of a cluster, each of which runs a rank; None if this process starts the ranks.
    Yields:
      A slot for each rank, in order, and the server. A single rank on this machine has no variables and no server, and
      needs no Horovod. Other hosts choose their network interface for Gloo themselves.
    Raises:
      LaunchError: Horovod is not installed, or this machine has no network interface for its ranks.
    """
    if plan.size == 1 and plan.is_local:
        yield [Slot(0, "", {})], None
        return
    if engine_of_ranks.engine() == "tensorflow":
        with _local_slots(plan) as made:
            yield made
        return
    try:
        horovod_internals.import_launcher()
    except Exception as error:  # a broken installation can raise anything
        raise LaunchError(
            f"{plan.size} ranks need Horovod, which cannot be imported ({error}). Install it (needs g++, cmake): "
            f"{FIX_HOROVOD}; or by hand: {INSTALL_HOROVOD}"
        ) from error
    named = f"localhost:{plan.size}" if plan.is_local else plan.hosts
    assigned = horovod_internals.assigned_slots(named, plan.size)
    server = KeyValueServer()
    try:
        slots: list[Slot] = []
        name = socket.gethostname()
        ways = [] if tasks is None else tasks.network_places(plan.size)
        way_to = functools.cache(functools.partial(_route_to_host, plan))
        has_address = functools.cache(has_address_here)
        for slot in assigned:
            host, address, interface = ways[slot.rank] if ways else way_to(slot.hostname)
            if not host and not has_address(name):  # Gloo crashes without such an address, on any interface
                raise LaunchError(
                    f"Horovod cannot find this machine by name. Expected an address for the name {name}; got none. Add "
                    f"a line to /etc/hosts: 127.0.0.1 {name}"
                )
            # Without a known route (a name that only ssh can resolve), the server listens on every interface.
            location = server.listen(address) if address else server.listen("", name=name)
            variables = horovod_internals.variables_of_rank(slot, location.address, location.port, [interface])
            slots.append(Slot(slot.rank, host, {name: str(text) for name, text in variables.items() if text != ""}))
        yield slots, server
    finally:
        server.stop()


@contextlib.contextmanager
def _local_slots(plan: Plan) -> Iterator[tuple[list[Slot], KeyValueServer]]:
    """Yields a slot for each rank, all on this machine, and a key-value server; does not need Horovod's launcher."""
    server = KeyValueServer()
    try:
        address, port = server.listen(_LOCAL)
        names = ("RANK", "SIZE", "LOCAL_RANK", "LOCAL_SIZE", "HOSTNAME", "GLOO_RENDEZVOUS_ADDR", "GLOO_RENDEZVOUS_PORT")
        slots = []
        for rank in range(plan.size):
            values = (rank, plan.size, rank, plan.size, "localhost", address, port)
            slots.append(Slot(rank, "", {f"HOROVOD_{name}": str(value) for name, value in zip(names, values)}))
        yield slots, server
    finally:
        server.stop()


def _route_to_host(plan: Plan, name: str) -> tuple[str, str, str]:
    """Returns how ranks on a host reach the server: the host's name, the server's address, and the network interface.

    The name is "" for this machine; the interface is "" on another host.
    """
    if not plan.is_local and not is_this_machine(name):
        return name, address_towards(name), ""
    if not plan.is_local:
        address = address_towards(next(other for other in plan.slots if not is_this_machine(other)))
        return "", address, environment.read_variable("HOROVOD_GLOO_IFACE") or find_interface(address)
    address = _LOCAL
    interface = find_interface(address)
    if not interface:
        raise LaunchError(f"no network interface that is up has the address {address}. Bring one up: ip link set lo up")
    return "", address, interface
