"""A hook that applies tail optimisation to a graph before its first run, for any optimizer."""

from __future__ import annotations

import logging
import os

import tensorflow as tf

from npu_bridge import collective
from npu_bridge.base.errors import say_once
from npu_bridge.base.files import make_local_folder, write_atomically
from npu_bridge.base.secondary_files import NonFatalOutput
from npu_bridge.base.terminal import logger
from npu_bridge.base.tf_internals.graphs import allow_graph_changes
from npu_bridge.options import of_graph
from npu_bridge.tailing import TailingReport, optimize_tail

_LOG = logger(__name__)
_KEY = ("npu_bridge", "tailing_report")  # TensorFlow exports collections with text keys only
REPORT_FILE = "tailing.json"
_FILES = rb'^\{\n  "fragments": '  # how they begin


class TailOptimizationHook(tf.estimator.SessionRunHook):
    """A hook that calls `optimize_tail` once for a graph: when its session begins or runs for the first time.

    A graph without an all-reduce of gradients, such as the graph of an evaluation, is not changed. Rank 0 logs the
    changes, and writes them to `tailing.json` in `folder`, unless `folder` is None.

    Ranks: collective; the graphs of all ranks get the same all-reduces.
    """

    def __init__(self, folder: str | None = None):
        self._folder = folder

    def begin(self):
        self._optimize_tail(tf.compat.v1.get_default_graph())

    def before_run(self, run_context):
        self._optimize_tail(run_context.session.graph)

    def _optimize_tail(self, graph):
        if graph.get_collection(_KEY) or of_graph.option_value_at_build("is_tailing_optimization", graph) is False:
            return  # done already, or switched off in NPUOptimizer
        ranks = collective.current()
        if ranks.size == 1:
            say_once(logging.INFO, "is_tailing_optimization has no effect: one rank trains alone.")
            return
        with allow_graph_changes(graph):  # a MonitoredSession finalizes it before its session exists
            report = optimize_tail(graph, ranks)
            graph.add_to_collection(_KEY, report)
        # NPUOptimizer has built its own decision early; only the checks of a script remain to be found.
        is_built_in = (
            of_graph.option_value_at_build("is_tailing_optimization", graph) is True and not report.has_changed
        )
        if report.has_found_gradients and ranks.rank == 0:
            self._write_report(report, logging.DEBUG if is_built_in else logging.INFO)

    def _write_report(self, report: TailingReport, level: int):
        _LOG.log(level, "%s", report.text())
        if self._folder is not None:
            path = os.path.join(self._folder, REPORT_FILE)
            NonFatalOutput(f"the report {path}").attempt(_write_text_file, path, report.json() + "\n")


def _write_text_file(path: str, text: str) -> None:
    make_local_folder(os.path.dirname(path))
    write_atomically(path, text, _FILES)


def tail_optimization_report_of(graph: tf.Graph) -> TailingReport | None:
    """Returns the report of the changes of a graph by a `TailOptimizationHook`; None if no hook saw the graph."""
    reports = graph.get_collection(_KEY)
    return reports[0] if reports else None
