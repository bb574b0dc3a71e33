"""By which address and interface this machine and another one talk to each other."""

from __future__ import annotations

import contextlib
import fcntl
import socket
import struct

__all__ = ["address_towards", "interface_of"]

_ANY_PORT = 9  # nothing is sent to it
_SIOCGIFADDR = 0x8915


def address_towards(host: str) -> str:
    """This machine's own IPv4 address on the way to a host; "" when there is no way."""
    with contextlib.suppress(OSError, UnicodeError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((host, _ANY_PORT))
        return str(probe.getsockname()[0])
    return ""


def interface_of(address: str) -> str:
    """The interface with an IPv4 address of this machine; "" when none has it as its first one."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for _, name in socket.if_nameindex():
            with contextlib.suppress(OSError):
                request = struct.pack("256s", name.encode()[:15])
                if socket.inet_ntoa(fcntl.ioctl(probe.fileno(), _SIOCGIFADDR, request)[20:24]) == address:
                    return name
    return ""
