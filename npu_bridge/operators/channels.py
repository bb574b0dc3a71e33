"""Passes tensors through named queues from one graph of a process to another.

Sessions share neither operators nor resources. So a channel is a Python queue, which operators of both graphs find by
its name. A read waits for the next write, and blocks one of TensorFlow's threads until then.
"""

from __future__ import annotations

import functools
import queue
import threading
from collections.abc import Sequence
from typing import Any

from npu_bridge.base.own_tensorflow import tf

_CHANNELS_LOCK = threading.Lock()
# Print operators write to standard error directly. So nothing is put into this channel: it is closed from the start.
LOG_CHANNEL = "_npu_log"


class _Channel:
    """A queue that can be closed. Once a closed queue is empty, reads raise StopIteration, and so do waiting reads."""

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
            raise StopIteration("the channel has ended")  # TensorFlow raises OutOfRangeError for this
        return values


def write_to_channel(name: str, tensors: Sequence[Any]) -> tf.Operation | None:
    """Returns an op that puts tensors into a channel; in eager execution, puts them at once."""
    channel = _channel(name)
    return tf.numpy_function(lambda *values: channel.put(values), tensors, [])


def read_from_channel(name: str, dtypes: Sequence[Any], shapes: Sequence[Any]) -> list[tf.Tensor]:
    """Waits for the next tensors in a channel, and returns them.

    Raises:
      tf.errors.OutOfRangeError: the channel has ended.
    """
    # In eager execution, a single result is not in a list.
    tensors = tf.nest.flatten(tf.numpy_function(_channel(name).get, [], list(dtypes)))
    for tensor, shape in zip(tensors, shapes):
        tensor.set_shape(shape)
    return tensors


def end_channel(name: str) -> tf.Operation | None:
    """Returns an op that closes a channel; tensors that are already in the channel can still be read."""
    return tf.numpy_function(_channel(name).end, [], [])


def _channel(name: str) -> _Channel:
    """Returns the channel with this name; makes it at the first call in the process."""
    with _CHANNELS_LOCK:
        return _make_channel(name)


@functools.cache
def _make_channel(name: str) -> _Channel:
    return _Channel(has_ended=name == LOG_CHANNEL)
