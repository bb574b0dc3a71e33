"""Connects a rank to the launcher: a socket pair through which the rank reports its progress and its end.

Reports are lines of JSON: the call in which the rank is stuck, or the exception that ends the rank. The launcher's
orders are lines of words: leave Horovod, begin no further step, end after a certain step, end at once. When the
launcher dies, for whatever reason, the link closes and the rank ends itself.
"""

from __future__ import annotations

import atexit
import contextlib
import json
import os
import select
import sys
import threading
import time
from typing import Any, Callable

from npu_bridge.base.terminal import logger
from npu_bridge.session.elastic import stop_request
from npu_run.rank.processor_time import name_horovods_threads
from npu_run.rank.stuck_call import MainThreadSampler

_LOG = logger(__name__)
_SAMPLE_SECS = 0.5
_CHUNK_BYTES = 4096


class RankLink:
    """The connection of a rank to the launcher, served by a separate thread.

    Args:
      file: file descriptor of this rank's end of the socket pair.
    Attributes:
      has_left_horovod: whether the launcher has ordered the rank to leave Horovod because the job hangs; later failures
        are secondary.
    """

    def __init__(self, file: int):
        self.has_left_horovod = False
        # The launcher's descriptor can be too large for `select`.
        self._file = os.dup(file)
        os.close(file)
        self._process = os.getpid()
        self._unread = b""
        self._last_error = ""
        self._stop_request = stop_request.stop_request_of_process()
        self._stop_request.connect_launcher(self.send)
        self._sampler = MainThreadSampler(threading.main_thread().ident or 0)
        atexit.register(self._sampler.end)  # registered first, so it runs after the exit handlers that wait for ranks
        name_horovods_threads()
        threading.Thread(target=self._answer_launcher, name="npu-run link", daemon=True).start()

    def send(self, message: dict[str, Any]) -> None:
        """Sends a message to the launcher. If the launcher is gone, the thread that serves the link ends this process.

        Sends nothing from a process that the script has forked, because the end of that process is not the end of the
        rank.
        """
        if os.getpid() != self._process:
            return
        with contextlib.suppress(OSError):
            os.write(self._file, json.dumps(message).encode() + b"\n")

    def _read_orders(self) -> list[list[str]]:
        """Returns the launcher's orders as lists of words; if the launcher is gone, the order to end."""
        with contextlib.suppress(ConnectionResetError):
            text = os.read(self._file, _CHUNK_BYTES)
            if text:
                *lines, self._unread = (self._unread + text).split(b"\n")
                return [line.decode().split() for line in lines]
        return [["end"]]

    def _execute_order(self, order: str, *words: str) -> None:
        if order == "leave":
            self.send({"position": self._sampler.position()})
            self.has_left_horovod = True
            _shut_down_horovod()
        elif order == "hold":
            self._stop_request.block_new_runs()
        elif order == "end_after":
            self._stop_request.allow_runs_until(int(words[0]))
        else:
            self._stop_request.kill_own_process()

    def _answer_launcher(self) -> None:
        while True:
            if select.select([self._file], [], [], _SAMPLE_SECS)[0]:
                for order in self._read_orders():
                    self._attempt(self._execute_order, *order)
            self._attempt(self._send_news)

    def _attempt(self, action: Callable[..., None], *arguments: str) -> None:
        """Calls a function. Logs an unexpected error if it is new, as the rank must carry out the orders after it."""
        try:
            action(*arguments)
        except Exception as error:
            if repr(error) != self._last_error:
                self._last_error = repr(error)
                _LOG.warning("npu-run: an unexpected error; the rank still carries out orders", exc_info=True)

    def _send_news(self) -> None:
        news = self._sampler.sample(time.monotonic())
        if news is not None:
            self.send(news)


def _shut_down_horovod() -> None:
    """Shuts Horovod down on all ranks, so that a rank that waits in a collective raises an error with its name."""
    hvd = sys.modules.get("horovod.tensorflow")
    # The function is missing while the module is being loaded.
    if hvd is not None and getattr(hvd, "is_initialized", bool)():
        threading.Thread(target=hvd.shutdown, name="npu-run shutdown", daemon=True).start()
