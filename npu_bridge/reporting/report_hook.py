"""Makes the page of a training, `report.html`, when it ends: a hook for sessions, a callback for Keras."""

from __future__ import annotations

import functools
import json
import os
import socket
import sys
from collections.abc import Sequence
from typing import Any, Callable, TextIO

import numpy as np
import tensorflow as tf

from npu_bridge import collective
from npu_bridge.base import environment
from npu_bridge.base.machine import usable_cores
from npu_bridge.base.secondary_files import Secondary
from npu_bridge.collective.apart import run_apart
from npu_bridge.options import of_graph
from npu_bridge.reporting import page  # its modules are loaded when a page is made
from npu_bridge.reporting.history import HISTORY_FILE, History
from npu_bridge.reporting.history_hook import HistoryHook
from npu_bridge.reporting.keras_numbers import Numbers
from npu_bridge.reporting.output import choose_output
from npu_bridge.reporting.step_hook import Observation
from npu_bridge.reporting.thinning import Thinning

# What a rank says of itself is a text of at most so many bytes.
_RANK_BYTES = 256


class ReportHook(tf.estimator.SessionRunHook):
    """Notes how a training was started, records its steps, and makes `report.html` when it ends; rank 0 writes.

    What cannot be written is told in the log; no training ends for it. Of a training that was interrupted,
    `npu-run report FOLDER` makes the page. Every `NPUEstimator` has such a hook.

    Args:
      folder: for `report.html`, `report.json` and `history.jsonl`.
      history: of a `HistoryHook` that records the steps already. None: this hook records them, ever more sparsely
        (`every_n_steps=None` of a `HistoryHook`).
      ranks: what `places_of_ranks` gave, for the table of ranks. None: their number alone.
      stream: where the path of the page is printed. None: `sys.stdout`, looked up when training ends.
    Graph: reads collections, adds nothing.
    Ranks: local.
    Example: with tf.train.MonitoredTrainingSession(hooks=[ReportHook("out/run")]) as session: ...
    """

    def __init__(
        self,
        folder: str,
        history: History | None = None,
        ranks: Sequence[dict[str, Any]] | None = None,
        stream: TextIO | None = None,
    ):
        self._recorder = tf.estimator.SessionRunHook()  # which does nothing
        if history is None:
            self._recorder = HistoryHook(os.path.join(folder, HISTORY_FILE), every_n_steps=None)
            history = self._recorder.history
        self._page = _Page(folder, history, ranks)
        self._options = None
        self._stream = stream

    def begin(self):
        """Looks up tensors, rank and options."""
        self._options = of_graph.options_of_graph()
        self._recorder.begin()

    def after_create_session(self, session, coord):
        """Writes down how the training was started."""
        self._recorder.after_create_session(session, coord)
        self._page.note(self._options or of_graph.options_of(session.graph))

    def before_run(self, run_context):
        """Asks for what is recorded."""
        return self._recorder.before_run(run_context)

    def after_run(self, run_context, run_values):
        """Records the step."""
        self._recorder.after_run(run_context, run_values)

    def end(self, session):
        """Makes the page, and prints where it is."""
        self._recorder.end(session)
        self._page.make(self._stream or sys.stdout)


class ReportCallback(tf.keras.callbacks.Callback):
    """The same for `model.fit`: records each batch, and makes `report.html` when `fit` ends.

    The loss is the one that Keras shows: the mean since the epoch began. With `verbose=0` the path is not printed.

    Args:
      folder: for `report.html`, `report.json` and `history.jsonl`.
    Ranks: local; only rank 0 writes.
    Example: model.fit(dataset, callbacks=npu_callbacks_append([ReportCallback("out/run")]))
    """

    def __init__(self, folder: str):
        super().__init__()
        self._history = History(os.path.join(folder, HISTORY_FILE))
        self._page = _Page(folder, self._history)
        self._writes = False
        self._thinning: Any = None  # a `Thinning` and the `Numbers` before a step, once training has begun
        self._before: Any = None

    def on_train_begin(self, logs=None):
        ranks = collective.current()
        self._writes = ranks.rank == 0
        if self._writes:
            self._before = Numbers.of(self.model.optimizer)
            self._history.begin_session(self._before.step, ranks=ranks.size)
            self._thinning = Thinning(self._before.step)
        self._page.note(None)

    def on_train_batch_end(self, batch, logs=None):
        if not self._writes:
            return
        before, now = self._before, Numbers.of(self.model.optimizer)
        skipped = (now.skipped_steps or 0) > (before.skipped_steps or 0)
        loss = (logs or {}).get("loss")
        seen = Observation(None if loss is None else float(loss), before.loss_scale, skipped, before.learning_rate)
        self._before = now
        self._thinning.add(seen, self._history.now, 1)
        if self._thinning.is_full:
            self._thinning.write(self._history, now.step)

    def on_train_end(self, logs=None):
        if self._writes:
            self._thinning.write(self._history, self._before.step, is_over=True)
            self._history.close()
        self._page.make(sys.stdout if (self.params or {}).get("verbose", 1) else None)


def _on_rank_0(action: Callable[..., None]) -> Callable[..., None]:
    """Does something for a page on rank 0; a training is worth more than its page and goes on where that fails."""

    @functools.wraps(action)
    def attempted(self: _Page, *arguments: Any) -> None:
        if collective.current().rank == 0:
            self.secondary.attempt(action, self, *arguments, now=True)

    return attempted


class _Page:
    """What both have in common: the files beside the history."""

    def __init__(self, folder: str, history: History, ranks: Sequence[dict[str, Any]] | None = None):
        self.folder, self._history, self._ranks = os.fspath(folder), history, ranks
        self.secondary = Secondary(f"the page of this training in {self.folder}", (Exception,))

    @_on_rank_0
    def note(self, options) -> None:
        """Writes `report.json`."""
        ranks = collective.current()
        known = [_this_place()] if ranks.size == 1 else [{} for _ in range(ranks.size)]
        gpus = [device.name for device in tf.config.list_physical_devices("GPU")]
        page.note_run(self.folder, self._history.path, options, self._ranks or known, gpus)

    @_on_rank_0
    def make(self, stream: TextIO | None) -> None:
        """Writes `report.html`, if there was a step, and says so on a stream; None says nothing."""
        if self._history.rows:
            made = page.write_page(self.folder, history=self._history)
            choose_output(stream).note(f"the page of this training is {made}")


def places_of_ranks() -> list[dict[str, Any]]:
    """Host, device, cores and process of each rank, in order.

    Ranks: collective; every rank gets the whole list.
    """
    ranks = collective.current()
    if ranks.size == 1:
        return [_this_place()]
    own = json.dumps(_this_place()).encode("utf-8")
    own = (own if len(own) <= _RANK_BYTES else b"{}").ljust(_RANK_BYTES)
    numbers = np.array([list(own)], np.int32)
    found = run_apart(lambda row: ranks.all_gather(row, name="report_places_of_ranks"), numbers)
    return [json.loads(bytes(row.tolist()).decode("utf-8")) for row in found]


def _this_place() -> dict[str, Any]:
    place = {"host": socket.gethostname()[:100], "cores": usable_cores(), "process": os.getpid()}
    device = environment.read_variable("ASCEND_DEVICE_ID")
    return {**place, "device": device[:20]} if device else place
