"""Finds the IPv4 address and the network interface through which this machine and another host communicate."""

from __future__ import annotations

import contextlib
import socket

_ANY_PORT, _FAR = 9, "192.0.2.1"  # nothing is sent to them


def address_towards(host: str) -> str:
    """Returns this machine's IPv4 address on the route to a host, which can be `user@host`; "" without a route."""
    with contextlib.suppress(OSError, UnicodeError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((host.rpartition("@")[2], _ANY_PORT))
        return str(probe.getsockname()[0])
    return ""


def find_interface(address: str) -> str:
    """Returns the active network interface with an IPv4 address of this machine; "" if no interface has the address.

    Without psutil, which is installed with Horovod, returns "": only Horovod needs the interface.
    """
    try:
        import psutil
    except ImportError:
        return ""
    states = psutil.net_if_stats()
    for name, addresses in psutil.net_if_addrs().items():
        is_up = name not in states or states[name].isup
        if is_up and any(entry.address == address for entry in addresses):
            return name
    return ""


def addresses_of_this_machine() -> list[str]:
    """Returns the IPv4 addresses through which other machines can reach this one; without psutil, perhaps not all."""
    try:
        import psutil

        families = (entry for entries in psutil.net_if_addrs().values() for entry in entries)
        addresses = [entry.address for entry in families if entry.family == socket.AF_INET]
    except ImportError:
        addresses = [address_towards(_FAR), address_towards(socket.gethostname())]
    return [address for address in dict.fromkeys(addresses) if address and not address.startswith("127.")]
