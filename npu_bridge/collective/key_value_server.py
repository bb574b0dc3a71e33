"""Runs the key-value server (Horovod's rendezvous server), which answers only requests with the secret of the job.

Horovod's C++ client sends plain HTTP without additional headers, so its requests cannot be signed. But the client
builds its URLs as `http://<address>:<port>/<scope>/<key>`. With an address of the form `10.0.0.1:4711/<secret>`, the
secret is the first part of every path. Only processes with a rank's environment know the secret; all others get no
answer. `docs/security.md` describes the protection and its limits.
"""

from __future__ import annotations

import contextlib
import hmac
import secrets
import socket
import threading
import time
from typing import NamedTuple

# The time limits for a request, after which it is refused: a slow client blocks a thread no longer.
_HEAD_SECS, _VALUE_SECS = 3.0, 30.0
_HEAD_BYTES = 8192
# The largest value of a rank is the plan of its gradients: 100 bytes for each variable.
_VALUE_BYTES = 16 * 2**20
_STORE_BYTES = 256 * 2**20
_MOST_REQUESTS = 256
_MOST_WAITING = 1024
_PAUSE_SECS = 0.01
_SECRET_BYTES = 16
_REASONS = {200: "OK", 404: "Not Found", 413: "Content Too Large"}


class ServerLocation(NamedTuple):
    """The location of a key-value server, in the form in which Horovod reads it from a rank's environment.

    Attributes:
      address: "host:port/secret", which makes Horovod send the secret.
      port: the port again, which Horovod reads separately.
    """

    address: str
    port: int


def read_host(address: str) -> str:
    """Returns the host from `ServerLocation.address`, or from a plain address."""
    return address.partition("/")[0].partition(":")[0]


def read_secret(address: str) -> str | None:
    """Returns the secret from `ServerLocation.address`; None without a secret."""
    return address.partition("/")[2] or None


class KeyValueServer:
    """A server that stores values by path, in memory. It drops and counts requests without the secret.

    Args:
      secret: the text that requests must contain; a random text by default.
    Attributes:
      refused: number of requests dropped so far.
    """

    def __init__(self, secret: str | None = None):
        self.refused = 0
        self._secret = secret or secrets.token_hex(_SECRET_BYTES)
        self._values: dict[str, bytes] = {}
        self._stored_bytes = 0
        self._lock = threading.Lock()
        self._listeners: dict[str, _Listener] = {}

    def listen(self, address: str, name: str | None = None) -> ServerLocation:
        """Opens a port on one address of this machine, unless the server already has one there.

        Args:
          address: an IPv4 address; "" for all addresses of this machine.
          name: the host name that ranks use in place of the address.
        Raises:
          OSError: `address` is not an address of this machine.
        """
        if address not in self._listeners:
            self._listeners[address] = _Listener((address, 0), self)
        port = self._listeners[address].port
        return ServerLocation(f"{name or address}:{port}/{self._secret}", port)

    def stop(self) -> None:
        """Closes all ports."""
        for listener in self._listeners.values():
            listener.close()

    def count_refused(self) -> None:
        """Counts a dropped request."""
        with self._lock:
            self.refused += 1

    def key_of(self, path: str) -> str | None:
        """Returns the key from a path; None if the path lacks the secret."""
        _, first, *rest = path.split("/")
        # Horovod appends the port to the address, whatever the address ends in.
        known = hmac.compare_digest(first.partition(":")[0].encode("utf-8", "replace"), self._secret.encode())
        return "/".join(rest) if known and len(rest) == 2 else None

    def get(self, key: str) -> bytes | None:
        with self._lock:
            return self._values.get(key)

    def put(self, key: str, value: bytes) -> bool:
        """Stores a value; returns False if the server is full."""
        with self._lock:
            more = len(key) + len(value)
            more -= len(key) + len(self._values[key]) if key in self._values else 0
            if self._stored_bytes + more > _STORE_BYTES:
                return False
            self._values[key] = value
            self._stored_bytes += more
            return True

    def delete(self, key: str) -> None:
        with self._lock:
            value = self._values.pop(key, None)
            if value is not None:
                self._stored_bytes -= len(key) + len(value)


class _Listener:
    """An open port, with a thread for each simultaneous request up to a limit."""

    def __init__(self, address: tuple[str, int], store: KeyValueServer):
        self._store = store
        self._socket = socket.create_server(address, backlog=_MOST_WAITING)
        self._is_closed = False
        self._lock = threading.Lock()
        self._threads = self._idle = 0
        self._add_thread()

    @property
    def port(self) -> int:
        return self._socket.getsockname()[1]

    def close(self) -> None:
        """Stops taking requests."""
        self._is_closed = True
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)  # wakes up the threads that wait for a request
        self._socket.close()

    def _add_thread(self) -> None:
        self._threads, self._idle = self._threads + 1, self._idle + 1
        try:
            threading.Thread(target=self._take_requests, name="key-value server", daemon=True).start()
        except RuntimeError:  # no more threads are allowed; the existing ones continue
            self._threads, self._idle = self._threads - 1, self._idle - 1
            if not self._threads:
                raise

    def _take_requests(self) -> None:
        while not self._is_closed:
            try:
                request = self._socket.accept()[0]
            except OSError:
                time.sleep(_PAUSE_SECS)  # closed, or this process has too many open files for the moment
                continue
            with self._lock:
                self._idle -= 1
                if not self._idle and self._threads < _MOST_REQUESTS:
                    self._add_thread()
            with request:
                try:
                    _ClientRequest(request, self._store).handle()
                    with contextlib.suppress(OSError):  # the client is gone
                        request.shutdown(socket.SHUT_WR)
                except Exception:  # a request that makes the handler fail is refused, without a line on a terminal
                    self._store.count_refused()
            with self._lock:
                self._idle += 1


class _ClientRequest:
    """A request: GET, PUT or DELETE of a path that begins with the secret."""

    def __init__(self, request: socket.socket, store: KeyValueServer):
        self._request, self._store = request, store

    def handle(self) -> None:
        """Answers the request; raises an error for an invalid request."""
        store = self._store
        head, rest = self._read_head()
        words = head.split(b"\r\n", 1)[0].decode("latin-1").split(" ")
        key = store.key_of(words[1]) if len(words) == 3 and words[1].startswith("/") else None
        if key is None or words[0] not in ("GET", "PUT", "DELETE"):
            raise ValueError("not a request of this job")
        value, status = b"", 200
        if words[0] == "GET":
            value = store.get(key)
            status, value = (404, b"") if value is None else (200, value)
        elif words[0] == "DELETE":
            store.delete(key)
        elif not self._store_value(store, key, head, rest):
            status = 413
        answer = f"HTTP/1.1 {status} {_REASONS[status]}\r\nContent-Length: {len(value)}\r\nConnection: close\r\n\r\n"
        self._request.settimeout(_VALUE_SECS)
        with contextlib.suppress(OSError):  # the client is gone
            self._request.sendall(answer.encode() + value)

    def _store_value(self, store: KeyValueServer, key: str, head: bytes, value_start: bytes) -> bool:
        """Reads and stores the value of a PUT; returns False if the value is too large."""
        fields = dict(line.lower().partition(b":")[::2] for line in head.split(b"\r\n"))
        length = int(fields.get(b"content-length", 0))
        if not 0 <= length <= _VALUE_BYTES:
            return False
        end = time.monotonic() + _VALUE_SECS
        value = bytearray(value_start)
        while len(value) < length:
            value += self._receive(end)
        return store.put(key, bytes(value[:length]))

    def _read_head(self) -> tuple[bytes, bytes]:
        """Returns the request's head, and the part of the body that has arrived."""
        end = time.monotonic() + _HEAD_SECS
        text = b""
        while b"\r\n\r\n" not in text:
            if len(text) > _HEAD_BYTES:
                raise ValueError("the head of the request is too long")
            text += self._receive(end)
        head, _, rest = text.partition(b"\r\n\r\n")
        return head, rest

    def _receive(self, deadline: float) -> bytes:
        """Returns the next bytes; raises an error after the deadline `deadline`."""
        self._request.settimeout(max(deadline - time.monotonic(), 0.001))
        text = self._request.recv(65536)
        if not text or time.monotonic() > deadline:
            raise socket.timeout("the request is incomplete")
        return text
