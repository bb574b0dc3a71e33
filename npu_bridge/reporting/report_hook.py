"""`ReportHook`: the page of a training, `report.html`, made when it ends."""

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
from npu_bridge.reporting.history import History
from npu_bridge.reporting.history_hook import HistoryHook
from npu_bridge.reporting.page import note_run, write_page
from npu_bridge.reporting.page.run_folder import HISTORY_FILE

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
      ranks: what `places_of_ranks` gave. None: the number of ranks alone.
    Graph: reads collections, adds nothing.
    Ranks: local.
    Example: with tf.train.MonitoredTrainingSession(hooks=[ReportHook("out/run")]) as session: ...
    """

    def __init__(
        self, folder: str, history: History | None = None, ranks: Sequence[dict[str, Any]] | None = None
    ):
        self._folder = os.fspath(folder)
        path = os.path.join(self._folder, HISTORY_FILE)
        self._recorder = HistoryHook(path, every_n_steps=None) if history is None else None
        self._history = history or self._recorder.history
        self._ranks = ranks
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
        self._try(self._note, session.graph)

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
        self._try(self._make_page)

    def _note(self, graph):
        ranks = collective.current()
        known = [_this_place()] if ranks.size == 1 else [{} for _ in range(ranks.size)]
        options = self._options or of_graph.options_of(graph)
        gpus = [device.name for device in tf.config.list_physical_devices("GPU")]
        note_run(self._folder, self._history.path, options, self._ranks or known, gpus)

    def _make_page(self):
        if self._history.rows:
            _log.info("the page of this training is %s", write_page(self._folder, history=self._history))

    def _try(self, action, *arguments):
        if collective.current().rank != 0:
            return
        try:
            action(*arguments)
        except Exception as error:  # a training is worth more than its page
            _log.warning("ReportHook: no page of this training (%s: %s).", type(error).__name__, error)


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
