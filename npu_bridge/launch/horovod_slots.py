"""Places for ranks: the slot numbering of Horovod's own launcher, and the server at which ranks meet."""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Iterator
from typing import NamedTuple

from npu_bridge import horovod_internals
from npu_bridge._install import INSTALL_HOROVOD
from npu_bridge._key_value_server import KeyValueServer
from npu_bridge.launch.errors import LaunchError
from npu_bridge.launch.host_address import address_towards, interface_of
from npu_bridge.launch.hosts import Plan, is_this_machine
from npu_bridge.options import environment

__all__ = ["Places", "Slot", "open_slots"]


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


class Places(NamedTuple):
    """Where the ranks of a job run, and the server they meet at.

    Attributes:
      slots: one for each rank, in order.
      server: None for a single rank of this machine, which has nobody to meet.
    """

    slots: list[Slot]
    server: KeyValueServer | None

    @property
    def refused(self) -> int:
        """Number of requests of strangers that the server has dropped so far."""
        return self.server.refused if self.server is not None else 0


@contextlib.contextmanager
def open_slots(plan: Plan) -> Iterator[Places]:
    """Describes the ranks of a plan; several of them have a rendezvous server while this block lasts.

    The server listens on the addresses of this machine by which its ranks reach it, and on no other: on 127.0.0.1 when
    all of them run here.

    Yields:
      The places. One rank alone on this machine has no variables, and needs no Horovod. On other hosts the interface
      for Gloo is left to be found there.
    Raises:
      LaunchError: Horovod is not installed, or this machine has no interface for its ranks.
    """
    if plan.size == 1 and plan.is_local:
        yield Places([Slot(0, "", {})], None)
        return
    try:
        horovod_internals.import_launcher()
    except Exception as error:  # a broken installation raises whatever it raises
        raise LaunchError(
            f"{plan.size} ranks need Horovod, which cannot be imported ({error}). Install it (needs g++, cmake): "
            f"{INSTALL_HOROVOD}"
        ) from error
    assigned = horovod_internals.assigned_slots(_hosts_for_horovod(plan), plan.size)
    server = KeyValueServer()
    try:
        slots = []
        for slot in assigned:
            host = "" if plan.is_local or is_this_machine(slot.hostname) else slot.hostname
            address, interfaces = _way_of(plan, host)
            # Only where no way is known, any will do: a name that ssh alone can resolve.
            location = server.listen(address) if address else server.listen("", name=socket.gethostname())
            variables = horovod_internals.variables_of_rank(slot, location.address, location.port, interfaces or [""])
            slots.append(Slot(slot.rank, host, {name: str(text) for name, text in variables.items() if text != ""}))
        yield Places(slots, server)
    finally:
        server.stop()


def _hosts_for_horovod(plan: Plan) -> str:
    return f"localhost:{plan.size}" if plan.is_local else plan.hosts


def _way_of(plan: Plan, host: str) -> tuple[str, list[str]]:
    """The server's address for ranks of a host ("" when unknown), and the interfaces of those of this machine."""
    if host:
        return address_towards(host), []
    if plan.is_local:
        return "127.0.0.1", _loopback()
    address = address_towards(next(other for other in plan.slots if not is_this_machine(other)))
    interface = environment.read_variable("HOROVOD_GLOO_IFACE") or interface_of(address)
    return address, [interface]


def _loopback() -> list[str]:
    interfaces = horovod_internals.loopback_interfaces()
    if not interfaces:
        raise LaunchError("no network interface has the address 127.0.0.1. Bring one up: ip link set lo up")
    return interfaces
