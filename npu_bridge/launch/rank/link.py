"""A rank's end of the link to the launcher: a socket pair through which it reports how it goes and how it ends.

Reports are lines of JSON: the call it is stuck in, and which exception ends it. What the launcher asks for are lines of
words: to leave Horovod, to begin no further step, to end after a certain one, to end at once. When the launcher dies,
however it dies, the link closes and the rank ends itself.
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
from typing import Any

from npu_bridge.launch.rank.processor_time import name_horovods_threads
from npu_bridge.launch.rank.stuck_call import MainThreadSampler
from npu_bridge.session.elastic import stop_request

__all__ = ["RankLink"]

_SAMPLE_SECS = 0.5
_CHUNK_BYTES = 4096


class RankLink:
    """Talks to the launcher from a thread of its own.

    Args:
      file: descriptor of this rank's end.
    Attributes:
      has_left_horovod: the launcher has asked for that, because the job hangs; failures from then on are secondary.
    """

    def __init__(self, file: int):
        self.has_left_horovod = False
        # The launcher's number of it may be beyond what `select` takes.
        self._file = os.dup(file)
        os.close(file)
        self._process = os.getpid()
        self._unread = b""
        self._stop_request = stop_request.of_this_process()
        self._stop_request.attach(self.send)
        self._sampler = MainThreadSampler(threading.main_thread().ident or 0)
        atexit.register(self._sampler.end)  # registered first, so it comes after whatever waits for ranks there
        name_horovods_threads()
        threading.Thread(target=self._attend, name="npu-run link", daemon=True).start()

    def send(self, message: dict[str, Any]) -> None:
        """Sends a message; where the launcher is gone, the thread that watches the link ends this process.

        A process that the script has forked is not the rank: how it ends is the script's business, and nothing is sent.
        """
        if os.getpid() != self._process:
            return
        with contextlib.suppress(OSError):
            os.write(self._file, json.dumps(message).encode() + b"\n")

    def _orders(self) -> list[list[str]]:
        """What the launcher asks for, word by word; once it is gone, perhaps with messages it has not read: the end."""
        with contextlib.suppress(ConnectionResetError):
            text = os.read(self._file, _CHUNK_BYTES)
            if text:
                *lines, self._unread = (self._unread + text).split(b"\n")
                return [line.decode().split() for line in lines]
        return [["end"]]

    def _obey(self, order: str, *words: str) -> None:
        if order == "leave":
            self.send({"position": self._sampler.position()})
            self.has_left_horovod = True
            _leave_horovod()
        elif order == "hold":
            self._stop_request.hold()
        elif order == "end_after":
            self._stop_request.end_after(int(words[0]))
        else:
            self._stop_request.end_at_once()

    def _attend(self) -> None:
        while True:
            if select.select([self._file], [], [], _SAMPLE_SECS)[0]:
                for order in self._orders():
                    self._obey(*order)
            news = self._sampler.sample(time.monotonic())
            if news is not None:
                self.send(news)


def _leave_horovod() -> None:
    """Ends Horovod on all ranks, so that whoever waits in a collective raises and names it."""
    hvd = sys.modules.get("horovod.tensorflow")
    if hvd is not None and hvd.is_initialized():
        threading.Thread(target=hvd.shutdown, name="npu-run shutdown", daemon=True).start()
