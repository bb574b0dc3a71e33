"""Makes the page of a training, `report.html`, when it ends: a hook for sessions, a callback for Keras."""

from __future__ import annotations

import json
import logging
import os
import socket
from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from npu_bridge import collective
from npu_bridge._machine import usable_cores
from npu_bridge.options import environment, of_graph
from npu_bridge.reporting import page  # its modules are loaded when a page is made
from npu_bridge.reporting.history import HISTORY_FILE, History
from npu_bridge.reporting.history_hook import HistoryHook
from npu_bridge.reporting.keras_numbers import Numbers
from npu_bridge.reporting.step_hook import Observation
from npu_bridge.reporting.thinning import Thinning

_log = logging.getLogger(__name__)
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
    Graph: reads collections, adds nothing.
    Ranks: local.
    Example: with tf.train.MonitoredTrainingSession(hooks=[ReportHook("out/run")]) as session: ...
    """

    def __init__(self, folder: str, history: History | None = None, ranks: Sequence[dict[str, Any]] | None = None):
        self._recorder = None
        if history is None:
            self._recorder = HistoryHook(os.path.join(folder, HISTORY_FILE), every_n_steps=None)
            history = self._recorder.history
        self._page = _Page(folder, history, ranks)
        self._options = None

    def begin(self):
        """Looks up tensors, rank and options."""
        self._options = of_graph.options_of_graph()
        if self._recorder:
            self._recorder.begin()

    def after_create_session(self, session, coord):
        """Writes down how the training was started."""
        if self._recorder:
            self._recorder.after_create_session(session, coord)
        self._page.note(self._options or of_graph.options_of(session.graph))

    def before_run(self, run_context):
        """Asks for what is recorded."""
        return self._recorder.before_run(run_context) if self._recorder else None

    def after_run(self, run_context, run_values):
        """Records the step."""
        if self._recorder:
            self._recorder.after_run(run_context, run_values)

    def end(self, session):
        """Makes the page."""
        if self._recorder:
            self._recorder.end(session)
        self._page.make()


class ReportCallback(tf.keras.callbacks.Callback):
    """The same for `model.fit`: records each batch, and makes `report.html` when `fit` ends.

    The loss is the one that Keras shows: the mean since the epoch began.

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
            self._write_kept()

    def on_train_end(self, logs=None):
        if self._writes:
            self._write_kept(is_over=True)
            self._history.close()
        self._page.make()

    def _write_kept(self, is_over: bool = False):
        for step, seen in self._thinning.take(self._before.step, is_over):
            of_step = seen.observation
            self._history.append(
                *(step, of_step.loss, of_step.loss_scale, of_step.skipped, of_step.learning_rate), time=seen.time
            )


class _Page:
    """What both have in common: the files beside the history, which no training ends for."""

    def __init__(self, folder: str, history: History, ranks: Sequence[dict[str, Any]] | None = None):
        self._folder, self._history, self._ranks = os.fspath(folder), history, ranks

    def note(self, options) -> None:
        """Writes `report.json`."""
        self._try(self._note, options)

    def make(self) -> None:
        """Writes `report.html`, if there was a step."""
        self._try(self._make)

    def _note(self, options):
        ranks = collective.current()
        known = [_this_place()] if ranks.size == 1 else [{} for _ in range(ranks.size)]
        gpus = [device.name for device in tf.config.list_physical_devices("GPU")]
        page.note_run(self._folder, self._history.path, options, self._ranks or known, gpus)

    def _make(self):
        if self._history.rows:
            _log.info("the page of this training is %s", page.write_page(self._folder, history=self._history))

    def _try(self, action, *arguments):
        if collective.current().rank != 0:
            return
        try:
            action(*arguments)
        except Exception as error:  # a training is worth more than its page
            _log.warning("no page of this training in %s (%s: %s).", self._folder, type(error).__name__, error)


def places_of_ranks() -> list[dict[str, Any]]:
    """Host, device, cores and process of each rank, in order.

    Ranks: collective; every rank gets the whole list.
    """
    ranks = collective.current()
    if ranks.size == 1:
        return [_this_place()]
    own = json.dumps(_this_place()).encode("utf-8")
    own = (own if len(own) <= _RANK_BYTES else b"{}").ljust(_RANK_BYTES)
    settings = tf.compat.v1.ConfigProto(device_count={"GPU": 0})  # those are left to the training's own session
    with tf.Graph().as_default(), tf.compat.v1.Session(config=settings) as session:
        numbers = tf.constant([list(own)], tf.int32)
        found = session.run(ranks.all_gather(numbers, name="report_places_of_ranks"))
    return [json.loads(bytes(row.tolist()).decode("utf-8")) for row in found]


def _this_place() -> dict[str, Any]:
    place = {"host": socket.gethostname()[:100], "cores": usable_cores(), "process": os.getpid()}
    device = environment.read_variable("ASCEND_DEVICE_ID")
    return {**place, "device": device[:20]} if device else place
