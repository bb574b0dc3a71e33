"""Where ranks sign that they came to a point: the key-value server that a Gloo job finds its peers through.

It works without any collective, so it can say who is missing from one, and it can wait for ranks that have none.
"""

from __future__ import annotations

import time
import urllib.error
import urllib.request

from npu_bridge.options import environment

ADDRESS_VARIABLE = "HOROVOD_GLOO_RENDEZVOUS_ADDR"
PORT_VARIABLE = "HOROVOD_GLOO_RENDEZVOUS_PORT"
_POLL_SECS = 0.01
_REQUEST_SECS = 30


class Noticeboard:
    """The ranks that came to one meeting, each with a line of text.

    Args:
      meeting: what the ranks meet for, unique in the job and the same on every rank.
    Attributes:
      address, port: where the server is; None when the ranks were not started by a Gloo launcher. The address holds
        the job's secret where `npu-run` has started the ranks.
    """

    def __init__(self, meeting: str):
        self.address = environment.read_variable(ADDRESS_VARIABLE)
        self.port = environment.read_variable(PORT_VARIABLE)
        self._url = f"http://{self.address}:{self.port}/npu_bridge_{meeting}/"
        # The server is one of the job's own hosts, never behind a proxy.
        self._opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))

    @property
    def exists(self) -> bool:
        """False when the ranks were not started by a Gloo launcher; nothing but `missing` and `sign` works then."""
        return bool(self.address and self.port)

    def sign(self, rank: int, text: str = "here") -> None:
        """Notes that a rank came; does nothing where there is no board."""
        if self.exists:
            request = urllib.request.Request(self._url + str(rank), data=text.encode(), method="PUT")
            self._opener.open(request, timeout=_REQUEST_SECS).close()

    def read(self, rank: int) -> str | None:
        """The text a rank has signed with; None when it has not come."""
        try:
            with self._opener.open(self._url + str(rank), timeout=_REQUEST_SECS) as answer:
                return answer.read().decode()
        except urllib.error.HTTPError as error:
            if error.code == 404:
                return None
            raise

    def missing(self, size: int) -> list[int]:
        """Which of the ranks 0..size-1 have not signed; empty where there is no board."""
        return [rank for rank in range(size) if self.exists and self.read(rank) is None]

    def wait(self, size: int, limit_secs: float) -> list[int]:
        """Waits until all ranks have signed; returns those that did not within the limit."""
        end = time.monotonic() + limit_secs
        missing = self.missing(size)
        while missing and time.monotonic() < end:
            time.sleep(_POLL_SECS)
            missing = [rank for rank in missing if self.read(rank) is None]
        return missing
