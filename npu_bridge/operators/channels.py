"""Passes tensors through named queues from one graph of a process to another.

Sessions share neither operators nor resources, so a channel is a Python queue that operators of both sides find by its
name. A read waits for the next write, and blocks one of TensorFlow's threads meanwhile.
"""

from __future__ import annotations

import functools
import queue
import threading
from collections.abc import Sequence
from typing import Any

from npu_bridge.base.own_tensorflow import tf

_ONE_AT_A_TIME = threading.Lock()
# Print operators write to standard error themselves here, so this channel is always empty: it ends at once.
LOG_CHANNEL = "_npu_log"


class _Channel:
    """A queue that can be closed: waiting and later reads then raise."""

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
            self.end()  # wakes up the next waiting read
            raise StopIteration("the channel has ended")  # TensorFlow turns it into an OutOfRangeError
        return values


def write(name: str, tensors: Sequence[Any]) -> tf.Operation | None:
    """Returns an op that puts tensors into a channel; eagerly it has run."""
    channel = _channel(name)
    return tf.numpy_function(lambda *values: channel.put(values), tensors, [])


def read(name: str, dtypes: Sequence[Any], shapes: Sequence[Any]) -> list[tf.Tensor]:
    """Returns the next tensors put into a channel, waiting for them; `tf.errors.OutOfRangeError` when it has ended."""
    # In eager execution, a single result is not in a list.
    tensors = tf.nest.flatten(tf.numpy_function(_channel(name).get, [], list(dtypes)))
    for tensor, shape in zip(tensors, shapes):
        tensor.set_shape(shape)
    return tensors


def end(name: str) -> tf.Operation | None:
    """Returns an op that ends a channel: tensors put into it before can still be read."""
    return tf.numpy_function(_channel(name).end, [], [])


def _channel(name: str) -> _Channel:
    """Returns the channel of a name, one per process: graphs find it only by its name."""
    with _ONE_AT_A_TIME:
        return _made_once(name)


@functools.cache
def _made_once(name: str) -> _Channel:
    return _Channel(has_ended=name == LOG_CHANNEL)
