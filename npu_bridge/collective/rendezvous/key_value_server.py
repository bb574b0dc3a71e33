"""Runs the key-value server (Horovod's rendezvous server), which answers only requests with the secret of the job.

Horovod's C++ client sends plain HTTP without additional headers, so its requests cannot be signed. But the client
builds its URLs as `http://<address>:<port>/<scope>/<key>`. With an address of the form `10.0.0.1:4711/<secret>`, the
secret is the first part of every path. Only processes with a rank's environment know the secret; all others get no
answer. `docs/security.md` describes the protection and its limits.
"""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import secrets
import socket
import threading
from typing import NamedTuple

# The time limits for a request, after which it is refused: a slow client takes no more of the simultaneous requests.
_HEAD_SECS, _VALUE_SECS = 3.0, 30.0
_HEAD_BYTES = 8192
# The largest value of a rank is the plan of its gradients: 100 bytes for each variable.
_VALUE_BYTES = 16 * 2**20
_STORE_BYTES = 256 * 2**20
_MOST_REQUESTS = 256
_MOST_WAITING = 1024
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

    One thread answers all requests.

    Args:
      secret: the text that requests must contain; a random text by default.
    Attributes:
      refused: number of requests dropped so far.
    """

    def __init__(self, secret: str | None = None):
        self.refused = 0
        self._secret = secret or secrets.token_hex(_SECRET_BYTES)
        self._values: dict[str, bytes] = {}
        self._servers: dict[str, asyncio.base_events.Server] = {}
        self._slots: asyncio.Semaphore | None = None
        self._loop = asyncio.new_event_loop()
        self._loop.set_exception_handler(lambda *_: None)  # no line on a terminal
        self._thread = threading.Thread(target=self._loop.run_forever, name="key-value server", daemon=True)
        self._thread.start()

    def listen(self, address: str, name: str | None = None) -> ServerLocation:
        """Opens a port on one address of this machine, unless the server already has one there.

        Args:
          address: an IPv4 address; "" for all addresses of this machine.
          name: the host name that ranks use in place of the address.
        Raises:
          OSError: `address` is not an address of this machine.
        """
        if address not in self._servers:
            self._servers[address] = self._run(self._open(address))
        port = self._servers[address].sockets[0].getsockname()[1]
        return ServerLocation(f"{name or address}:{port}/{self._secret}", port)

    def stop(self) -> None:
        """Closes all ports."""
        if self._thread.is_alive():
            self._run(self._close())
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join()
            self._loop.close()

    def count_refused(self) -> None:
        """Counts a dropped request."""
        self.refused += 1

    def _run(self, coroutine):
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop).result()

    async def _open(self, address):
        self._slots = self._slots or asyncio.Semaphore(_MOST_REQUESTS)
        settings = {"limit": _HEAD_BYTES, "backlog": _MOST_WAITING, "family": socket.AF_INET}
        return await asyncio.start_server(self._handle, address or None, 0, **settings)

    async def _close(self):
        for server in self._servers.values():
            server.close()
        requests = asyncio.all_tasks() - {asyncio.current_task()}
        for request in requests:
            request.cancel()
        await asyncio.gather(*requests, return_exceptions=True)

    async def _handle(self, reader, writer):
        """Answers a request; drops and counts an invalid one."""
        writer.transport.set_write_buffer_limits(0)  # so that `drain` waits until all is sent
        try:
            async with self._slots:
                answer = await self._answer(reader)
                with contextlib.suppress(OSError):  # the client is gone
                    writer.write(answer)
                    await asyncio.wait_for(writer.drain(), _VALUE_SECS)
        except Exception:  # without a line on a terminal
            self.count_refused()
        finally:
            writer.transport.abort()

    async def _answer(self, reader):
        """Returns the answer to a GET, PUT or DELETE of a path with the secret; raises an error for other requests."""
        head = await asyncio.wait_for(reader.readuntil(b"\r\n\r\n"), _HEAD_SECS)
        words = head.split(b"\r\n", 1)[0].decode("latin-1").split(" ")
        key = self._key_of(words[1]) if len(words) == 3 and words[1].startswith("/") else None
        if key is None or words[0] not in ("GET", "PUT", "DELETE"):
            raise ValueError("not a request of this job")
        value, status = b"", 200
        if words[0] == "GET":
            status, value = (200, self._values[key]) if key in self._values else (404, b"")
        elif words[0] == "DELETE":
            self._values.pop(key, None)
        elif not await self._store_value(key, head, reader):
            status = 413
        head = f"HTTP/1.1 {status} {_REASONS[status]}\r\nContent-Length: {len(value)}\r\nConnection: close\r\n\r\n"
        return head.encode() + value

    def _key_of(self, path):
        """Returns the key from a path; None if the path lacks the secret."""
        _, first, *rest = path.split("/")
        # Horovod appends the port to the address, whatever the address ends in.
        known = hmac.compare_digest(first.partition(":")[0].encode("utf-8", "replace"), self._secret.encode())
        return "/".join(rest) if known and len(rest) == 2 else None

    async def _store_value(self, key, head, reader):
        """Reads and stores the value of a PUT; returns False if the value is too large, or the server is full."""
        fields = dict(line.lower().partition(b":")[::2] for line in head.split(b"\r\n"))
        length = int(fields.get(b"content-length", 0))
        if not 0 <= length <= _VALUE_BYTES:
            return False
        value = await asyncio.wait_for(reader.readexactly(length), _VALUE_SECS)
        others = sum(len(name) + len(kept) for name, kept in self._values.items() if name != key)
        if others + len(key) + length > _STORE_BYTES:
            return False
        self._values[key] = value
        return True
