"""Writes curves of a training for TensorBoard: a hook, which every `NPUEstimator` has, and a callback for Keras."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any, Callable

import tensorflow as tf

from npu_bridge._files import check_room
from npu_bridge.reporting.metrics import MetricsCallback, MetricsHook


class TensorBoardHook(MetricsHook):
    """Writes scalars `training/...`: those of a `MetricsHook`. When the precision changes, that is written as text.

    Args:
      folder: of the event files; the one an Estimator writes to may be shared.
      every_n_steps, loss, clock: as for `MetricsHook`.
    Raises:
      ValueError: `every_n_steps` is below 1.
    Ranks: local; only rank 0 writes.
    """

    def __init__(
        self,
        folder: str,
        every_n_steps: int = 100,
        loss: tf.Tensor | str | None = None,
        clock: Callable[[], float] = time.monotonic,
    ):
        super().__init__(TensorBoardWriter(folder), every_n_steps, loss, clock)


class TensorBoardCallback(MetricsCallback):
    """The same curves for `model.fit`, but for the gradient norm, which Keras does not show.

    Args:
      folder: of the event files.
      every_n_steps, clock: as for `MetricsCallback`.
    Raises:
      ValueError: `every_n_steps` is below 1.
    Ranks: local; only rank 0 writes.
    Example:
      model.fit(dataset, callbacks=npu_callbacks_append([TensorBoardCallback("out/events")]))
    """

    def __init__(self, folder: str, every_n_steps: int = 100, clock: Callable[[], float] = time.monotonic):
        super().__init__(TensorBoardWriter(folder), every_n_steps, clock)


class TensorBoardWriter:
    """A writer into the event files of a folder.

    Args:
      folder: the folder; TensorFlow keeps one writer for it in a process.
    """

    failures = (RuntimeError,)  # of TensorFlow's writer, whose thread has ended then

    def __init__(self, folder: str):
        self._folder = str(folder)
        self._precision: str | None = None
        self._own: Any = None  # in place of the one that has failed
        self._has_failed = False

    def begin(self, step: int) -> None:
        """Nothing is opened before the first entry."""
        self._precision = None

    def write(self, step: int, values: Mapping[str, float], precision: str | None) -> None:
        """Writes scalars, and a precision that is another one than before."""
        entries = [
            tf.compat.v1.Summary.Value(tag=f"training/{name}", simple_value=value) for name, value in values.items()
        ]
        if precision not in (None, self._precision):
            entries.append(_text("training/precision", precision))
        self._add(tf.compat.v1.Summary(value=entries), step)
        self._precision = precision or self._precision

    def close(self) -> None:
        """Sees that everything is in the file, which others may go on writing to."""
        if "://" not in self._folder:
            check_room(self._folder)
        self._writer().flush()

    def _add(self, summary: tf.compat.v1.Summary, step: int) -> None:
        # A writer of TensorFlow that has failed once takes entries and drops them.
        if "://" not in self._folder:
            check_room(self._folder)
        writer = self._writer()
        self._has_failed = True
        writer.add_summary(summary, step)
        writer.flush()
        self._has_failed = False

    def _writer(self) -> Any:
        with tf.Graph().as_default():  # in eager code there is no such writer
            if self._has_failed:
                self._own = tf.compat.v1.summary.FileWriter(self._folder)
            return self._own or tf.compat.v1.summary.FileWriterCache.get(self._folder)


def _text(tag, text):
    """An entry that TensorBoard shows as text."""
    plugin = tf.compat.v1.SummaryMetadata.PluginData(plugin_name="text")
    metadata = tf.compat.v1.SummaryMetadata(plugin_data=plugin)
    return tf.compat.v1.Summary.Value(tag=tag, tensor=tf.make_tensor_proto([text]), metadata=metadata)
