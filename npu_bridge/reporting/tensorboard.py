"""Writes curves of a training for TensorBoard, by a hook that every `NPUEstimator` has or a callback for Keras."""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping
from typing import Callable

import tensorflow as tf

from npu_bridge.reporting.event_files import EventFiles
from npu_bridge.reporting.keras_numbers import split_training_and_validation
from npu_bridge.reporting.metrics import MetricsCallback, MetricsHook

# TensorFlow's names for two numbers that an Estimator writes in training and in evaluation.
_STOCK = {"loss": "loss", "steps_per_sec": "global_step/sec"}


class TensorBoardHook(MetricsHook):
    """A hook that writes the numbers of a `MetricsHook` for TensorBoard, and each change of the precision as text.

    The curves are `loss` and `global_step/sec`, as in an Estimator, and `training/...` for all other numbers. For the
    first two, an Estimator itself would write a point every `save_summary_steps` steps; these points are replaced.

    Args:
      folder: folder of the event files, which can be the `model_dir` of an Estimator.
      every_n_steps: as in `MetricsHook`; None: every step at first, then fewer and fewer.
      loss, clock, most_steps: as in `MetricsHook`.
    Raises:
      ValueError: `every_n_steps` is below 1.
    Ranks: local; only rank 0 writes.
    """

    def __init__(
        self,
        folder: str,
        every_n_steps: int | None = None,
        loss: tf.Tensor | str | None = None,
        clock: Callable[[], float] = time.monotonic,
        most_steps: int = 100,
    ):
        self._curves = TensorBoardWriter(folder)
        super().__init__(self._curves, every_n_steps, loss, clock, most_steps)

    def after_create_session(self, session, coord):
        """Reserves the tags of this hook's curves."""
        super().after_create_session(session, coord)
        if self._entries.writes:
            self._curves.reserve_tags([tag for name, tag in _STOCK.items() if name != "loss" or name in self._fetches])


class TensorBoardCallback(MetricsCallback):
    """A callback that writes the curves of `TensorBoardHook`, except the gradient norm, and curves of epochs.

    Metrics are `training/NAME`, the means of Keras since the epoch began. At the end of an epoch, they are written as
    `epoch_NAME`. Validation metrics have the same names, in the subfolder `validation`, so that TensorBoard draws both
    in one picture. The x axis of all curves is the optimizer's steps.

    Args:
      folder: folder of the event files.
      every_n_steps, clock: as in `TensorBoardHook`.
    Raises:
      ValueError: `every_n_steps` is below 1.
    Ranks: local; only rank 0 writes.
    Example:
      model.fit(dataset, callbacks=npu_callbacks_append([TensorBoardCallback("out/events")]))
    """

    def __init__(self, folder: str, every_n_steps: int | None = None, clock: Callable[[], float] = time.monotonic):
        super().__init__(TensorBoardWriter(folder), every_n_steps, clock)
        self._folder = str(folder)

    def on_epoch_end(self, epoch, logs=None):
        if not self._entries.writes:
            return
        step = self._steps.read().step
        in_training, in_validation = split_training_and_validation(logs)
        for folder, found in ((self._folder, in_training), (f"{self._folder}/validation", in_validation)):
            if found:
                EventFiles.of(folder).add_summary(_scalars({f"epoch_{name}": found[name] for name in found}), step)


class TensorBoardWriter:
    """A writer of metrics to the event files of a folder.

    Args:
      folder: the folder; all hooks of a process that write to it share one file.
    """

    def __init__(self, folder: str):
        self._folder = str(folder)
        EventFiles.of(self._folder)  # before TensorFlow's hooks ask for one
        self._precision: str | None = None
        self._waiting: list[tuple[tf.compat.v1.Summary, int]] = []

    def begin(self, step: int) -> None:
        """Resets the precision. The first entry opens the file."""
        self._precision = None

    def write(self, step: int, values: Mapping[str, float], precision: str | None) -> None:
        """Keeps scalars, and a changed precision, until `flush`."""
        summary = _scalars({_STOCK.get(name, f"training/{name}"): value for name, value in values.items()})
        if precision not in (None, self._precision):
            summary.value.append(_text_entry("training/precision", precision))
            self._precision = precision
        self._waiting.append((summary, step))

    def reserve_tags(self, tags: Iterable[str]) -> None:
        """Reserves tags until `close`: entries of other writers with these tags are dropped."""
        events = EventFiles.of(self._folder)
        if isinstance(events, EventFiles):
            events.reserve_tags(self, tags)

    def flush(self) -> None:
        """Writes the kept entries."""
        waiting, self._waiting = self._waiting, []
        events = EventFiles.of(self._folder)
        if isinstance(events, EventFiles):
            if not events.add_unless_reserved(self, waiting):
                self._precision = None  # to be written again
            return
        for summary, step in waiting:
            events.add_summary(summary, step)
        events.flush()

    def close(self) -> None:
        """Writes the kept entries and releases this writer's tags; other writers can still use the file."""
        if self._waiting:
            self.flush()
        events = EventFiles.of(self._folder)
        if isinstance(events, EventFiles):
            events.release_tags(self)


def _scalars(values):
    return tf.compat.v1.Summary(
        value=[tf.compat.v1.Summary.Value(tag=tag, simple_value=value) for tag, value in values.items()]
    )


def _text_entry(tag, text):
    """Returns an entry that TensorBoard shows as text."""
    plugin = tf.compat.v1.SummaryMetadata.PluginData(plugin_name="text")
    metadata = tf.compat.v1.SummaryMetadata(plugin_data=plugin)
    return tf.compat.v1.Summary.Value(tag=tag, tensor=tf.make_tensor_proto([text]), metadata=metadata)
