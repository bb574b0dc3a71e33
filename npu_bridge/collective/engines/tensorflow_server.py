"""Makes each rank a TensorFlow server, through which TensorFlow's own collectives reach the other ranks.

One server serves eager execution, functions and the sessions of TF 1 graphs. It must run before a rank makes its first
tensor. So a rank of `npu-run` announces the server before the script begins; the first tensor or session starts it.

TensorFlow's servers listen on all addresses and accept requests of anyone. So a filter in the system's kernel drops all
packets for the server's port that do not come from a host of the job. `docs/security.md` describes the limits of this.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import logging
import os
import socket
import struct
import sys
from typing import TYPE_CHECKING, Any

from npu_bridge.base import environment, reading
from npu_bridge.base.address import address_towards
from npu_bridge.base.errors import message, say_once
from npu_bridge.base.session_wrapper import change_session_settings
from npu_bridge.base.tf_internals.servers import serve_from_first_use, start_serving
from npu_bridge.base.tf_internals.sessions import default_session_config, has_eager_context
from npu_bridge.collective.engines import engine_of_ranks
from npu_bridge.collective.rendezvous import barrier
from npu_bridge.collective.rendezvous.key_value_server import read_host
from npu_bridge.collective.rendezvous.key_value_store import KeyValueStore

if TYPE_CHECKING:
    import tensorflow as tf

_HOST, _LOOPBACK = "127.0.0.1", "127."
_ATTACH_FILTER = 26  # SO_ATTACH_FILTER of Linux, which Python does not name
_LISTENS = "0A"  # state of a socket in /proc/net/tcp
# Instructions for the filter are a code, a jump if true, a jump if false, and a value.
_TAKE, _DROP = (0x06, 0, 0, 0xFFFFFFFF), (0x06, 0, 0, 0)
_IF_NOT_IPV4 = ((0x30, 0, 0, 0xFFF00000), (0x54, 0, 0, 0xF0), (0x15, 1, 0, 0x40))  # the byte with the packet's version
_SOURCE = (0x20, 0, 0, 0xFFF0000C)  # the address that the packet comes from


class NoServerError(RuntimeError):
    """An error for a rank that cannot use TensorFlow's own collective operators."""


class TensorFlowServer:
    """The TensorFlow server of this rank.

    Attributes:
      target: the server's address, as the target of sessions.
    """

    def __init__(self):
        place = environment.launcher_placement()
        self._rank, self._size = place.rank, place.size
        self._addresses = KeyValueStore("tensorflow_servers")
        _check_job_is_supported(self._addresses, place)
        self._host = _HOST if place.local_size == place.size else _address_for_others(self._addresses)
        self._hosts = {self._host}
        # Bound without listening, so that only the server of this process can get the port when it starts.
        self._port = socket.socket()
        self._port.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        self._port.bind((self._host, 0))
        own = f"{self._host}:{self._port.getsockname()[1]}"
        self.target = f"grpc://{own}"
        self._addresses.put(self._rank, own)
        serve_from_first_use(self._describe_cluster, self._accept_hosts_only)
        change_session_settings(self._session_settings_for_server)

    def start(self) -> None:
        """Starts the server, unless it runs. Waits until all ranks have chosen a port, not until they listen on it."""
        start_serving()

    def _describe_cluster(self, settings: tf.compat.v1.ConfigProto) -> Any:
        from tensorflow.core.protobuf import cluster_pb2, tensorflow_server_pb2

        missing = self._addresses.wait(self._size, barrier.max_wait_secs())
        if missing:
            raise NoServerError(
                f"npu_bridge.collective: some ranks have not announced a port. Expected the ports of {self._size} "
                f"ranks within {barrier.max_wait_secs()} seconds; got none from rank "
                f"{', '.join(map(str, missing))}. Raise HCCL_CONNECT_TIMEOUT, or find out why these ranks "
                f"did not start."
            )
        cluster = cluster_pb2.ClusterDef()
        for rank in range(self._size):
            address = self._addresses.get(rank)
            cluster.job.add(name=_job_name(rank)).tasks[0] = address
            self._hosts.add(_check_route(address.partition(":")[0], self._host))
        _bypass_proxies(self._hosts)
        own = tensorflow_server_pb2.ServerDef(cluster=cluster, job_name=_job_name(self._rank), protocol="grpc")
        own.default_session_config.CopyFrom(settings)
        self._set_leader(own.default_session_config)
        return own

    def _session_settings_for_server(self, session_target, session_config):
        """Returns target and settings for a session of the script: for this server, unless the target names another."""
        if session_target:
            return session_target, session_config
        import tensorflow as tf

        self.start()
        own = tf.compat.v1.ConfigProto()
        own.CopyFrom(session_config if session_config is not None else default_session_config())
        # A server has one pool of threads for all its sessions, and refuses others.
        own.ClearField("use_per_session_threads")
        own.ClearField("session_inter_op_thread_pool")
        own.isolate_session_state = True  # else all sessions of a server have the same variables
        self._set_leader(own)
        if not own.device_filters:
            own.device_filters.append(f"/job:{_job_name(self._rank)}")
        return self.target, own

    @staticmethod
    def _set_leader(config):
        config.experimental.collective_group_leader = f"/job:{_job_name(0)}/replica:0/task:0"

    def _accept_hosts_only(self):
        """Makes the server's port accept packets from the job's hosts only; does nothing outside of Linux.

        Raises:
          NoServerError: the kernel refuses the filter, and the user has not allowed open ports.
        """
        if not sys.platform.startswith("linux"):
            return
        port = self._port.getsockname()[1]
        problem = _attach_packet_filter(port, _make_packet_filter(self._hosts))
        if not problem:
            return
        text = message(
            "npu_bridge.collective",
            f"other machines can reach port {port} of this rank",
            "a filter in the kernel that drops their packets",
            problem,
            "Add --allow-open-ports if you trust all machines that reach this one (docs/security.md), or use Horovod.",
        )
        if not environment.is_flag_on(environment.OPEN_PORTS):
            raise NoServerError(text)
        say_once(logging.WARNING, text)


@functools.cache
def server_of_process() -> TensorFlowServer:
    """Returns the server of this rank; the first call announces the server.

    Raises:
      NoServerError: `npu-run` did not start this rank, the job is elastic, or its hosts do not reach each other.
    """
    return TensorFlowServer()


def announce_server_if_needed() -> None:
    """Announces the server of this rank, if the job needs it; must be called before TensorFlow is loaded.

    Raises:
      ValueError: variables of the launcher contradict each other, or `NPU_COLLECTIVES` names no engine.
      NoServerError: as for `server_of_process`.
    """
    launched = environment.launcher_placement()
    if launched is not None and launched.size > 1 and engine_of_ranks.choose_engine() == "tensorflow":
        server_of_process()


def _check_job_is_supported(store, place):
    got = ""
    if not store.exists:
        got = "ranks of another launcher"
    elif has_eager_context():
        got = "a rank that has made tensors before npu-run could make it a server"
    elif environment.is_flag_on("HOROVOD_ELASTIC"):
        got = "an elastic job of horovodrun"
    problem = engine_of_ranks.unsupported_job_reason(place.local_size == place.size, got)
    if problem:
        raise NoServerError(f"npu_bridge.collective: {problem}.")


def _address_for_others(store):
    """Returns the address at which other hosts reach this machine: its address on the route to the launcher's host."""
    address = address_towards(read_host(store.address))
    if not address or address.startswith(_LOOPBACK):
        raise NoServerError(
            f"npu_bridge.collective: a rank's address is unknown. Expected an IPv4 address that other hosts reach, on "
            f"the route to {read_host(store.address)}; got {address or 'none'}. Name the hosts of the job by addresses."
        )
    return address


def _check_route(host, own_address):
    """Returns a host of the job; raises NoServerError if this machine reaches the host from an unexpected address."""
    source = address_towards(host)
    if source != own_address:
        raise NoServerError(
            f"npu_bridge.collective: hosts of the job are in several networks. Expected a route from {own_address} to "
            f"{host}; got {f'a route from {source}' if source else 'none'}. Name the hosts by addresses of one network."
        )
    return host


def _bypass_proxies(hosts):
    """Makes gRPC connect to the job's hosts directly, also if the environment names a proxy."""
    given = environment.read_variable("no_grpc_proxy") or environment.read_variable("no_proxy")
    environment.write_variable("no_grpc_proxy", ",".join([*filter(None, [given]), *sorted(hosts)]))


def _make_packet_filter(hosts):
    """Returns a filter's instructions: accept packets from `hosts` only; from 127.* if 127.0.0.1 is the only host."""
    mask = 0xFF000000 if hosts == {_HOST} else 0xFFFFFFFF
    rows = [*_IF_NOT_IPV4, _DROP, _SOURCE, (0x54, 0, 0, mask)]
    for host in sorted(hosts):
        rows += [(0x15, 0, 1, int.from_bytes(socket.inet_aton(host), "big") & mask), _TAKE]
    return [*rows, _DROP]


def _attach_packet_filter(port, instructions):
    """Attaches a filter to this process's sockets that listen on a port; returns why it cannot, or ""."""
    listening = _listening_sockets(port)
    codes = [struct.pack("HBBI", *instruction) for instruction in instructions]
    program = ctypes.create_string_buffer(b"".join(codes))
    attached = 0
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):  # such as a file that is closed by now
            if os.readlink(f"/proc/self/fd/{name}") not in listening:
                continue
            copy = os.dup(int(name))
            with socket.socket(fileno=copy) as listener:
                try:
                    listener.setsockopt(
                        socket.SOL_SOCKET, _ATTACH_FILTER, struct.pack("HP", len(codes), ctypes.addressof(program))
                    )
                except OSError as error:
                    return f"{error.strerror or error} for {len(codes)} instructions"
                attached += 1
    return "" if attached else "no listening socket in /proc/self/fd and /proc/net"


def _job_name(rank):
    """Returns a rank's job name in the cluster; TensorFlow orders the ranks by these names."""
    return f"rank{rank:05}"


def _listening_sockets(port):
    """Returns the names of this machine's sockets that listen on a port, as in the links of /proc/self/fd."""
    found = set()
    for table in ("tcp", "tcp6"):
        with contextlib.suppress(OSError), reading.open_file(f"/proc/net/{table}") as rows:
            for row in (line.split() for line in rows):
                if row[1].endswith(f":{port:04X}") and row[3] == _LISTENS:
                    found.add(f"socket:[{row[9]}]")
    return found
