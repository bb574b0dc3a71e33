"""Places for local ranks, from Horovod's own launcher: its slot numbering and its Gloo rendezvous server."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from npu_bridge._install import INSTALL_HOROVOD
from npu_bridge.launch.errors import LaunchError

__all__ = ["open_local_slots"]


@contextlib.contextmanager
def open_local_slots(size: int) -> Iterator[list[dict[str, str]]]:
    """Describes `size` local ranks; several of them have a rendezvous server while this block lasts.

    Yields:
      For each rank, in order, the environment variables by which Horovod finds its peers. One rank alone has none, and
      needs no Horovod.
    Raises:
      LaunchError: Horovod is not installed, or this machine has no loopback interface.
    """
    if size == 1:
        yield [{}]
        return
    try:
        from horovod.runner import gloo_run
        from horovod.runner.common.util import hosts
        from horovod.runner.http.http_server import RendezvousServer
        from horovod.runner.util import network
    except Exception as error:  # a broken installation raises whatever it raises
        raise LaunchError(
            f"{size} ranks need Horovod, which cannot be imported ({error}). Install it (needs g++, cmake): "
            f"{INSTALL_HOROVOD}"
        ) from error
    interfaces = network.get_local_intfs()
    if not interfaces:
        raise LaunchError("no network interface has the address 127.0.0.1. Bring one up: ip link set lo up")
    plan = hosts.get_host_assignments(hosts.parse_hosts(f"localhost:{size}"), size)
    server = RendezvousServer()
    port = server.start()
    server.init(plan)
    job = gloo_run.create_run_env_vars("127.0.0.1", interfaces, port)
    slots = [{**job, **gloo_run.create_slot_env_vars(slot)} for slot in plan]
    try:
        yield [{name: str(value) for name, value in slot.items()} for slot in slots]
    finally:
        server.stop()
