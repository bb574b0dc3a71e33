"""Places for ranks, from Horovod's own launcher: its slot numbering and its Gloo rendezvous server."""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Iterator
from typing import NamedTuple

from npu_bridge._install import INSTALL_HOROVOD
from npu_bridge.launch.errors import LaunchError
from npu_bridge.launch.host_address import address_towards, interface_of
from npu_bridge.launch.hosts import Plan, is_this_machine
from npu_bridge.options import environment

__all__ = ["Slot", "open_slots"]


class Slot(NamedTuple):
    """Where a rank runs.

    Attributes:
      rank: its number.
      host: the host to reach through ssh; "" for this machine.
      variables: environment variables by which Horovod finds the rank's peers.
    """

    rank: int
    host: str
    variables: dict[str, str]


@contextlib.contextmanager
def open_slots(plan: Plan) -> Iterator[list[Slot]]:
    """Describes the ranks of a plan; several of them have a rendezvous server while this block lasts.

    Yields:
      A slot for each rank, in order. One rank alone on this machine has no variables, and needs no Horovod. On other
      hosts the interface for Gloo is left to be found there.
    Raises:
      LaunchError: Horovod is not installed, or this machine has no interface for its ranks.
    """
    if plan.size == 1 and plan.is_local:
        yield [Slot(0, "", {})]
        return
    try:
        from horovod.runner import gloo_run
        from horovod.runner.common.util import hosts
        from horovod.runner.http.http_server import RendezvousServer
    except Exception as error:  # a broken installation raises whatever it raises
        raise LaunchError(
            f"{plan.size} ranks need Horovod, which cannot be imported ({error}). Install it (needs g++, cmake): "
            f"{INSTALL_HOROVOD}"
        ) from error
    assigned = hosts.get_host_assignments(hosts.parse_hosts(_hosts_for_horovod(plan)), plan.size)
    server = RendezvousServer()
    port = server.start()
    server.init(assigned)
    try:
        slots = []
        for slot in assigned:
            host = "" if plan.is_local or is_this_machine(slot.hostname) else slot.hostname
            address, interfaces = _way_of(plan, host)
            variables = gloo_run.create_run_env_vars(address, interfaces or [""], port)
            variables.update(gloo_run.create_slot_env_vars(slot))
            slots.append(Slot(slot.rank, host, {name: str(text) for name, text in variables.items() if text != ""}))
        yield slots
    finally:
        server.stop()


def _hosts_for_horovod(plan: Plan) -> str:
    return f"localhost:{plan.size}" if plan.is_local else plan.hosts


def _way_of(plan: Plan, host: str) -> tuple[str, list[str]]:
    """The rendezvous server's address for ranks of a host, and the interfaces of those of this machine."""
    if host:
        return address_towards(host) or socket.gethostname(), []
    if plan.is_local:
        return "127.0.0.1", _loopback()
    address = address_towards(next(other for other in plan.slots if not is_this_machine(other)))
    interface = environment.read_variable("HOROVOD_GLOO_IFACE") or interface_of(address)
    return address or socket.gethostname(), [interface]


def _loopback() -> list[str]:
    from horovod.runner.util import network

    interfaces = network.get_local_intfs()
    if not interfaces:
        raise LaunchError("no network interface has the address 127.0.0.1. Bring one up: ip link set lo up")
    return list(interfaces)
