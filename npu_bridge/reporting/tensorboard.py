"""Writes curves of a training for TensorBoard: a hook, which every `NPUEstimator` has, and a callback for Keras."""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping
from typing import Callable

import tensorflow as tf

from npu_bridge.reporting.event_files import EventFiles
from npu_bridge.reporting.keras_numbers import Numbers, split_logs
from npu_bridge.reporting.metrics import MetricsCallback, MetricsHook

# TensorFlow's names for two numbers, under which an Estimator writes them in training and in evaluation.
_STOCK = {"loss": "loss", "steps_per_sec": "global_step/sec"}


class TensorBoardHook(MetricsHook):
    """Writes the numbers of a `MetricsHook` for TensorBoard. When the precision changes, that is written as text.

    The curves are `loss` and `global_step/sec`, as an Estimator calls them, and `training/...` for all others. What an
    Estimator writes under the first two names by itself, one point in `save_summary_steps`, is left out then.

    Args:
      folder: of the event files; the one an Estimator writes to may be shared.
      every_n_steps: as for `MetricsHook`; None: every step at first, then ever fewer.
      loss, clock, most_steps: as for `MetricsHook`.
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
        """Takes over the names of what it writes."""
        super().after_create_session(session, coord)
        if self._entries.writes:
            self._curves.own([tag for name, tag in _STOCK.items() if name != "loss" or name in self._fetches])


class TensorBoardCallback(MetricsCallback):
    """The same curves for `model.fit`, but for the gradient norm, which Keras does not show; and those of epochs.

    Metrics are `training/NAME`, the means since the epoch began, as Keras shows them. At the end of an epoch they are
    written as `epoch_NAME`, those of validation under the same names into the folder `validation` below, so that
    TensorBoard draws both in one picture. All are over the optimizer's steps.

    Args:
      folder: of the event files.
      every_n_steps, clock: as for `TensorBoardHook`.
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
        step = Numbers.of(self.model.optimizer).step
        in_training, in_validation = split_logs(logs)
        for folder, found in ((self._folder, in_training), (f"{self._folder}/validation", in_validation)):
            if found:
                EventFiles.of(folder).add_summary(_scalars({f"epoch_{name}": found[name] for name in found}), step)


class TensorBoardWriter:
    """A writer into the event files of a folder.

    Args:
      folder: the folder; all hooks of a process that write there share one writer.
    """

    def __init__(self, folder: str):
        self._folder = str(folder)
        EventFiles.of(self._folder)  # before TensorFlow's hooks ask for one
        self._precision: str | None = None
        self._waiting: list[tuple[tf.compat.v1.Summary, int]] = []

    def begin(self, step: int) -> None:
        """Nothing is opened before the first entry."""
        self._precision = None

    def write(self, step: int, values: Mapping[str, float], precision: str | None) -> None:
        """Keeps scalars, and a precision that is another one than before, until `flush`."""
        summary = _scalars({_STOCK.get(name, f"training/{name}"): value for name, value in values.items()})
        if precision not in (None, self._precision):
            summary.value.append(_text("training/precision", precision))
            self._precision = precision
        self._waiting.append((summary, step))

    def own(self, tags: Iterable[str]) -> None:
        """Leaves out what others write under these tags, until `close`, and what an earlier one like this writes."""
        events = EventFiles.of(self._folder)
        if isinstance(events, EventFiles):
            events.own(self, tags)

    def flush(self) -> None:
        """Writes what is kept."""
        waiting, self._waiting = self._waiting, []
        events = EventFiles.of(self._folder)
        if isinstance(events, EventFiles):
            if not events.add_own(self, waiting):
                self._precision = None  # to be written again
            return
        for summary, step in waiting:
            events.add_summary(summary, step)
        events.flush()

    def close(self) -> None:
        """Sees that everything is in the file, which others may go on writing to."""
        if self._waiting:
            self.flush()
        events = EventFiles.of(self._folder)
        if isinstance(events, EventFiles):
            events.give_up(self)


def _scalars(values):
    return tf.compat.v1.Summary(
        value=[tf.compat.v1.Summary.Value(tag=tag, simple_value=value) for tag, value in values.items()]
    )


def _text(tag, text):
    """An entry that TensorBoard shows as text."""
    plugin = tf.compat.v1.SummaryMetadata.PluginData(plugin_name="text")
    metadata = tf.compat.v1.SummaryMetadata(plugin_data=plugin)
    return tf.compat.v1.Summary.Value(tag=tag, tensor=tf.make_tensor_proto([text]), metadata=metadata)
