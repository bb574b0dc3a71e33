"""Reads and writes the job's key-value store: the server through which the ranks of a Gloo job find each other.

The store works without collectives, so it can find the ranks that are missing from a collective. Horovod's own client
(`horovod.runner.http.http_client`, 0.28) is not used: it unpickles the server's values, goes through proxies, has no
time limit, and reports a missing key like a missing server.
"""

from __future__ import annotations

import time
import urllib.error
import urllib.request

from npu_bridge.base import environment

ADDRESS_VARIABLE = "HOROVOD_GLOO_RENDEZVOUS_ADDR"
PORT_VARIABLE = "HOROVOD_GLOO_RENDEZVOUS_PORT"
_POLL_SECS = 0.01
_REQUEST_SECS = 30


class KeyValueStore:
    """A scope of the key-value store, with a text for each rank under the rank's number.

    Args:
      scope: the purpose of the texts, unique in the job and the same on every rank.
    Attributes:
      address, port: the server's address and port; None if no Gloo launcher started the ranks. The address contains the
        job's secret if `npu-run` started the ranks.
    """

    def __init__(self, scope: str):
        self.address = environment.read_variable(ADDRESS_VARIABLE)
        self.port = environment.read_variable(PORT_VARIABLE)
        self._url = f"http://{self.address}:{self.port}/npu_bridge_{scope}/"
        # The server is one of the job's own hosts, never behind a proxy.
        self._opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))

    @property
    def exists(self) -> bool:
        """Whether a Gloo launcher started the ranks. If not, only `missing` and `put` can be called."""
        return bool(self.address and self.port)

    def put(self, rank: int, text: str = "here") -> None:
        """Stores the text of a rank; does nothing without a store."""
        if self.exists:
            request = urllib.request.Request(self._url + str(rank), data=text.encode(), method="PUT")
            self._open(request).close()

    def get(self, rank: int) -> str | None:
        """Returns the text of a rank, or None."""
        try:
            with self._open(self._url + str(rank)) as answer:
                return answer.read().decode()
        except urllib.error.HTTPError as error:
            if error.code == 404:
                return None
            raise

    def _open(self, request):
        """Sends a request, and again if the server refuses it, as it does after this process has stood still."""
        try:
            return self._opener.open(request, timeout=_REQUEST_SECS)
        except (ConnectionError, urllib.error.URLError) as error:
            if not isinstance(getattr(error, "reason", error), ConnectionError):
                raise
        return self._opener.open(request, timeout=_REQUEST_SECS)

    def find_missing_ranks(self, size: int) -> list[int]:
        """Returns the ranks among 0..size-1 without a text; empty without a store."""
        return [rank for rank in range(size) if self.exists and self.get(rank) is None]

    def wait(self, size: int, limit_secs: float) -> list[int]:
        """Waits until all ranks have put a text; returns the ranks without a text after the time limit."""
        end = time.monotonic() + limit_secs
        missing = self.find_missing_ranks(size)
        while missing and time.monotonic() < end:
            time.sleep(_POLL_SECS)
            missing = [rank for rank in missing if self.get(rank) is None]
        return missing
