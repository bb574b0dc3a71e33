"""Changes entries of a shared dictionary for blocks of code: threads with equal changes share them, others wait."""

from __future__ import annotations

import contextlib
import threading
from collections import ChainMap
from collections.abc import Iterator, Mapping, MutableMapping
from typing import Any, Callable, NamedTuple


class _OpenBlock(NamedTuple):
    """The entries in a block, the entries before it (None if missing), and the thread of each call of `enter`."""

    values: Mapping[str, Any]
    before: dict[str, Any]
    threads: list[int]


class EqualBlocks:
    """Blocks in which a dictionary that all threads share, such as `os.environ`, has other entries.

    A thread in its block can wait for another thread: for a batch, or for other ranks. So a block does not wait for
    blocks with equal entries. It waits while other threads run in blocks with other entries. If all threads in blocks
    wait to enter a further block, one of them continues.
    """

    def __init__(self, entries: MutableMapping[str, Any]):
        self._entries = entries
        self._open: list[_OpenBlock] = []  # the outermost first
        self._waiting: set[int] = set()  # threads
        self._changed = threading.Condition()

    def get_outside(self, name: str) -> Any:
        """Returns an entry as it is without the open blocks; None for a missing one."""
        return ChainMap(*[block.before for block in self._open], self._entries).get(name)

    @contextlib.contextmanager
    def enter(self, choose_values: Callable[[], Mapping[str, Any]]) -> Iterator[None]:
        """Sets entries for a block; when the last thread has left it, the earlier ones are restored."""
        thread = threading.get_ident()
        with self._changed:
            self._waiting.add(thread)
            self._changed.notify_all()
            try:
                while not self._can_join(values := choose_values()):
                    if self._waiting.issuperset(other for block in self._open for other in block.threads):
                        self._open.append(_OpenBlock(values, {name: self._entries.get(name) for name in values}, []))
                        self._entries.update(values)
                        break
                    self._changed.wait()
            finally:  # after Ctrl-C, too: the thread is still in its outer block
                self._waiting.discard(thread)
            self._open[-1].threads.append(thread)
        try:
            yield
        finally:
            with self._changed:
                self._open[-1].threads.remove(thread)
                if not self._open[-1].threads:
                    self._restore()
                self._changed.notify_all()  # perhaps all threads that are left in blocks wait now

    def _can_join(self, values):
        return len(self._open) == 1 and self._open[0].values == values

    def _restore(self):
        for name, value in self._open[-1].before.items():
            if value is None:
                self._entries.pop(name, None)
            else:
                self._entries[name] = value
        self._open.pop()
