"""Restarts Horovod in the middle of a job, to declare more process sets.

All ranks stop Horovod, then all ranks start it. They find each other through a key-value server that rank 0 starts for
each restart. The launcher's server cannot be used: it still has the addresses of the first start, which a fast rank
would take for new ones.
"""

from __future__ import annotations

import socket
from collections.abc import Sequence
from typing import Any

from npu_bridge.base import environment
from npu_bridge.collective.engines.thread_priority import give_new_threads_real_time_priority
from npu_bridge.collective.rendezvous import barrier
from npu_bridge.collective.rendezvous.key_value_server import KeyValueServer, read_host, read_secret
from npu_bridge.collective.rendezvous.key_value_store import ADDRESS_VARIABLE, PORT_VARIABLE, KeyValueStore


def can_restart() -> bool:
    """Returns whether Horovod can be restarted: only in a job that is not elastic and has a Gloo launcher."""
    return KeyValueStore("start").exists and not environment.is_flag_on("HOROVOD_ELASTIC")


def restart_horovod(hvd: Any, rank: int, size: int, process_sets: Sequence[list[int]], exchange_name: str) -> None:
    """Stops Horovod on all ranks and starts it with these process sets, numbered from 1 in this order.

    Args:
      hvd: the module `horovod.tensorflow`. Only its `shutdown` and `init` are called, because another rank can have
        stopped Horovod already.
      process_sets: members of each set, in the same order on every rank.
      exchange_name: name of the restart, unique in the job and the same on every rank.
    Raises:
      RanksMissingError: some ranks did not restart in time.
    Ranks: collective over the whole job; no other collective may be running.
    """
    limit, store = barrier.max_wait_secs(), KeyValueStore(exchange_name)
    hvd.shutdown()
    store.put(rank, _start_key_value_server(store) if rank == 0 else "down")
    missing = store.wait(size, limit)
    if missing:
        text = barrier.describe_missing_ranks(missing, "the groups that were agreed upon", f"within {limit} seconds")
        raise barrier.RanksMissingError(text)
    address, port = store.get(0).split()
    environment.write_variable(ADDRESS_VARIABLE, address)
    environment.write_variable(PORT_VARIABLE, port)
    with give_new_threads_real_time_priority():
        hvd.init(process_sets=[hvd.ProcessSet(members) for members in process_sets])


def _start_key_value_server(store):
    """Starts a key-value server that lives as long as this process; returns its address and port as text.

    The server listens on the address from which this rank reaches the launcher's server, and requires the job's secret.
    """
    with socket.create_connection((read_host(store.address), store.port), timeout=30) as connection:
        own_address = connection.getsockname()[0]
    location = KeyValueServer(read_secret(store.address)).listen(own_address)
    return f"{location.address} {location.port}"
