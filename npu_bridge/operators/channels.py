"""Named queues that hand tensors from one graph of a process to another.

Sessions share neither operators nor resources, so a channel is a queue of Python that operators of both sides reach by
its name. Reading waits for what is written, and keeps one of TensorFlow's threads while it waits.
"""

from __future__ import annotations

import functools
import queue
import threading
from collections.abc import Sequence
from typing import Any

from npu_bridge.base.own_tensorflow import tf

_ONE_AT_A_TIME = threading.Lock()
# Prints go to standard error by themselves here, so nothing ever comes on this channel: it ends at once.
LOG_CHANNEL = "_npu_log"


class _Channel:
    """A queue that can be closed: reads that wait then, or come later, are told so."""

    def __init__(self, has_ended: bool = False):
        self._items: queue.Queue = queue.Queue()
        if has_ended:
            self.end()

    def put(self, values: Sequence[Any]) -> None:
        self._items.put(values)

    def end(self) -> None:
        self._items.put(None)

    def get(self) -> Sequence[Any]:
        values = self._items.get()
        if values is None:
            self.end()  # for the next one who waits
            raise StopIteration("the channel has ended")  # TensorFlow makes an OutOfRangeError of it
        return values


def write(name: str, tensors: Sequence[Any]) -> tf.Operation | None:
    """An op that puts tensors into a channel; eagerly it is done."""
    channel = _channel(name)
    return tf.numpy_function(lambda *values: channel.put(values), tensors, [])


def read(name: str, dtypes: Sequence[Any], shapes: Sequence[Any]) -> list[tf.Tensor]:
    """Tensors that wait for the next ones put into a channel; `tf.errors.OutOfRangeError` when it has ended."""
    # Eagerly, a single result comes without a list around it.
    tensors = tf.nest.flatten(tf.numpy_function(_channel(name).get, [], list(dtypes)))
    for tensor, shape in zip(tensors, shapes):
        tensor.set_shape(shape)
    return tensors


def end(name: str) -> tf.Operation | None:
    """An op that ends a channel: what was put into it before can still be read."""
    return tf.numpy_function(_channel(name).end, [], [])


def _channel(name: str) -> _Channel:
    """The channel of a name, one for the process: graphs reach it by its name alone."""
    with _ONE_AT_A_TIME:
        return _made_once(name)


@functools.cache
def _made_once(name: str) -> _Channel:
    return _Channel(has_ended=name == LOG_CHANNEL)
