"""Makes the page of a training, `report.html`, at its end: by a hook for sessions, or a callback for Keras."""

from __future__ import annotations

import functools
import os
import socket
import sys
import time
from collections.abc import Iterable, Sequence
from typing import Any, Callable, TextIO

import tensorflow as tf

from npu_bridge import collective
from npu_bridge.base import environment
from npu_bridge.base.machine import usable_cores
from npu_bridge.base.secondary_files import NonFatalOutput
from npu_bridge.base.train_functions import TrainedBatches, unwrap_train_function, wrap_train_function
from npu_bridge.collective.small_values import gather_values
from npu_bridge.gradients.steps.skips_in_a_row import SkipsInARow
from npu_bridge.options import of_graph
from npu_bridge.options.as_toml import OPTIONS_FILE
from npu_bridge.reporting import page  # its modules are loaded when a page is made
from npu_bridge.reporting.failure_hook import FailureHook, report_failure, stops_training
from npu_bridge.reporting.history import HISTORY_FILE, History
from npu_bridge.reporting.history_hook import HistoryHook
from npu_bridge.reporting.keras_numbers import FirstEpochCallback, FittedSteps, split_training_and_validation
from npu_bridge.reporting.output import choose_output
from npu_bridge.reporting.run_size import count_parameters, peak_gpu_memory, peak_memory_of_ranks
from npu_bridge.reporting.step_hook import Observation, StepHook
from npu_bridge.reporting.straggler_callback import latest_comparison_of
from npu_bridge.reporting.summary import StepTimes, format_ending
from npu_bridge.reporting.tensorboard import TensorBoardCallback, TensorBoardHook
from npu_bridge.reporting.thinning import HistoryThinner
from npu_bridge.session import steps_per_run


class ReportHook(tf.estimator.SessionRunHook):
    """A hook that records how a training was started and each of its steps, and makes `report.html` at the end.

    Rank 0 writes. If a file cannot be written, this is logged and the training continues. If an error or Ctrl-C stops
    the training, the page shows this (`FailureHook`). Every `NPUEstimator` has such a hook.

    Args:
      folder: folder for `report.html`, `report.json`, `run.toml` and `history.jsonl`.
      history: history of a `HistoryHook` that already records the steps. None: this hook records them, more and more
        sparsely, as a `HistoryHook` with `every_n_steps=None` does.
      ranks: the result of `places_of_ranks`, for the table of ranks. None: the page has only the number of ranks.
      stream: where the summary and the path of the page are printed. None: the `sys.stdout` at the end.
      curves: whether to also write the curves of a `TensorBoardHook` into the folder.
      is_brief: whether to print only the first line of the summary.
      config: the `NPURunConfig`, for `run.toml`. None: `run.toml` has the options of the session.
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
        curves: bool = True,
        is_brief: bool = False,
        config: Any = None,
    ):
        self._parts: list[TensorBoardHook | HistoryHook] = [TensorBoardHook(folder)] if curves else []
        if history is None:
            recorder = HistoryHook(os.path.join(folder, HISTORY_FILE), every_n_steps=None)
            self._parts.append(recorder)
            history = recorder.history
        self.history = history
        self._page = _ReportWriter(folder, history, ranks, is_brief, config)
        self._failure = FailureHook(folder, self._finish_after_error, history, stream)
        self._graph = StepHook()  # reads the step and the size of a batch
        self._options = None
        self._begin_page: Callable[[], None] | None = None
        self._stream = stream

    def begin(self):
        """Finds the tensors to fetch, the rank and the options."""
        self._options = of_graph.options_of_current_graph()
        for part in (*self._parts, self._graph, self._failure):
            part.begin()

    def after_create_session(self, session, coord):
        """Records how the training was started."""
        for part in self._parts:
            part.after_create_session(session, coord)
        self._page.write_facts(self._options or of_graph.options_of(session.graph))
        trained = session.graph.get_collection(tf.compat.v1.GraphKeys.TRAINABLE_VARIABLES)
        size = (self._graph.read_step(session), self._graph.samples_per_step, trained)
        self._begin_page = functools.partial(self._page.begin, *size)  # later, as another hook can begin the history
        self._failure.after_create_session(session, coord)

    def before_run(self, run_context):
        """Fetches the recorded tensors."""
        if self._begin_page is not None:
            self._begin_page()
            self._begin_page = None
        if self._graph.step_in(run_context) is not None:
            self._page.begin_run()
        wanted = [part.before_run(run_context) for part in self._parts]
        return tf.estimator.SessionRunArgs([each.fetches if each else {} for each in wanted])

    def after_run(self, run_context, run_values):
        """Records the step."""
        if self._graph.step_in(run_context) is None:
            return
        self._page.end_run(steps_per_run(run_context.session))
        for part, results in zip(self._parts, run_values.results):
            part.after_run(run_context, run_values._replace(results=results))

    def exclude_secs(self, secs: float) -> None:
        """Excludes some seconds since the last step (an evaluation, say) from step times."""
        self._page.exclude_secs(secs)

    def end(self, session):
        """Makes the page, and prints a summary and the path of the page."""
        for part in self._parts:
            part.end(session)
        self._page.write_report(self._stream or sys.stdout, self._graph.read_step(session))

    def _finish_after_error(self, step: int | None) -> None:
        """Writes the steps and curves that are still kept when an error ends the session."""
        for part in self._parts:
            if isinstance(part, HistoryHook):
                part.write_last_step(step)
            else:
                part.close()
        if collective.current().rank == 0:
            self._page.note_memory(step or 0)


class ReportCallback(FirstEpochCallback):
    """A callback for `model.fit` that records each batch, and makes `report.html` at the end of `fit`.

    The loss is the one that Keras shows: the mean since the epoch began. With `verbose=0`, the path is not printed. If
    the model is compiled anew between two calls of `fit`, the second call continues the report of the first.

    Args:
      folder: folder for `report.html`, `report.json`, `run.toml` and `history.jsonl`.
      curves: whether to also write the curves of a `TensorBoardCallback` into the folder.
    Ranks: local; only rank 0 writes.
    Example: model.fit(dataset, callbacks=npu_callbacks_append([ReportCallback("out/run")]))
    """

    def __init__(self, folder: str, curves: bool = True):
        super().__init__()
        self._history = History(os.path.join(folder, HISTORY_FILE))
        self._page = _ReportWriter(folder, self._history)
        self._curves = TensorBoardCallback(folder) if curves else tf.keras.callbacks.Callback()
        self._writes = False
        self._thinning: Any = None  # a `HistoryThinner` and the numbers before a step, once training has begun
        self._before: Any = None
        self._skips, self._steps, self._batches = SkipsInARow(), FittedSteps(), TrainedBatches()
        self._compared: Any = None  # the comparison of ranks noted last

    def begin(self):
        ranks = collective.current()
        self._batches.begin_fit(self.model)
        self._writes = ranks.rank == 0
        if self._writes:
            self._before = self._steps.begin(self.model)
            self._history.begin_session(self._before.step, ranks=ranks.size)
            self._thinning = HistoryThinner(self._before.step)
        self._curves.set_model(self.model)
        self._curves.on_train_begin()
        self._curves.on_epoch_begin(0)
        self._page.write_facts(None)
        trained = self.model.trainable_weights if self.model.built else ()
        self._page.begin(self._before.step if self._writes else 0, None, trained)
        if self.model.train_function is not None:
            wrap_train_function(self.model, self._train_and_report)

    def _train_and_report(self, train, iterator):
        """Calls the train function. An error is reported here, as Keras calls no callback after an error."""
        try:
            return train(iterator)
        except BaseException as error:
            if stops_training(error):
                unwrap_train_function(self.model, self._train_and_report)
                self._page.secondary.attempt(self._finish_after_error, error)
            raise

    def _finish_after_error(self, error):
        step = self._before.step if self._writes else None
        self._curves.on_train_end()
        if self._writes:
            self._thinning.write(self._history, step, is_training_over=True)
            self._history.close()
            self._page.note_memory(step)
        report_failure(self._page.folder, error, step, self._history if self._writes else None, self._stream)

    @property
    def _stream(self):
        return sys.stdout if (self.params or {}).get("verbose", 1) else None

    def on_train_batch_begin(self, batch, logs=None):
        super().on_train_batch_begin(batch, logs)
        self._page.begin_run()

    def on_train_batch_end(self, batch, logs=None):
        if not self._writes:
            return
        batches = self._batches.count_new()
        self._page.end_run(batches)
        self._curves.on_train_batch_end(batch, logs)
        before, now = self._before, self._steps.read()
        skips = (now.skipped_steps or 0) - (before.skipped_steps or 0)
        loss = (logs or {}).get("loss")
        seen = Observation(None if loss is None else float(loss), before.loss_scale, skips > 0, before.learning_rate)
        if skips or now.step != before.step:  # else gradients were only accumulated
            # Some optimizers count skipped steps as steps, too.
            are_all_skipped = now.step == before.step or skips >= batches
            self._skips.count_steps(are_all_skipped, seen.loss_scale, seen.loss)
        self._before = now
        found = latest_comparison_of(self.model)
        if found is not None and found is not self._compared:
            self._compared = found
            self._history.note_comparison(found._replace(step=now.step))
        self._thinning.add(seen, self._history.now, 1)
        if self._thinning.is_full:
            self._thinning.write(self._history, now.step)

    def on_epoch_end(self, epoch, logs=None):
        self._curves.on_epoch_end(epoch, logs)
        _, in_validation = split_training_and_validation(logs)
        if self._writes and in_validation:
            self._history.append_evaluation(self._before.step, in_validation)

    def on_test_begin(self, logs=None):
        self._curves.on_test_begin(logs)

    def on_test_end(self, logs=None):
        self._curves.on_test_end(logs)

    def on_train_end(self, logs=None):
        super().on_train_end(logs)
        self._curves.on_train_end(logs)
        if self._writes:
            self._thinning.write(self._history, self._before.step, is_training_over=True)
            self._history.close()
        unwrap_train_function(self.model, self._train_and_report)
        self._page.write_report(self._stream, self._before.step if self._writes else 0)


def _run_only_on_rank_0(action: Callable[..., None]) -> Callable[..., None]:
    """Wraps a method of `_ReportWriter`: only rank 0 runs it, and its errors are logged and do not end the training."""

    @functools.wraps(action)
    def act_on_rank_0(self: _ReportWriter, *arguments: Any) -> None:
        if collective.current().rank == 0:
            self.secondary.attempt(action, self, *arguments, is_last_chance=True)

    return act_on_rank_0


class _ReportWriter:
    """A writer of the report files other than the history, for the hook and the callback."""

    def __init__(
        self,
        folder: str,
        history: History,
        ranks: Sequence[dict[str, Any]] | None = None,
        is_brief: bool = False,
        config: Any = None,
    ):
        self.folder, self._history, self._ranks, self._is_brief = os.fspath(folder), history, ranks, is_brief
        self._config = config
        self.secondary = NonFatalOutput(f"the page of this training in {self.folder}", (Exception,))
        self._peaks: dict[int, int] = {}  # of memory, by rank
        self._start, self._began, self._steps_per_run = 0, time.monotonic(), 1
        self._times, self._run_began = StepTimes(), 0.0

    def begin(self, step: int, samples: int | None, trained: Iterable) -> None:
        """Records the size of the training."""
        self._start, self._began, self._times, self._steps_per_run = step, time.monotonic(), StepTimes(), 1
        if collective.current().rank == 0:
            self._history.note_facts(step, samples_per_step=samples, parameters=count_parameters(trained))

    def begin_run(self) -> None:
        """Begins a session run."""
        self._run_began = time.monotonic()

    def end_run(self, steps: int) -> None:
        """Ends a session run of `steps` steps."""
        self._steps_per_run = steps
        self._times.add(time.monotonic() - self._run_began, steps)
        if (
            self._times.runs & (self._times.runs - 1) == 0
        ):  # not only at the end, as other ranks can end before this one
            self._update_peaks()

    def exclude_secs(self, secs: float) -> None:
        """Excludes some seconds from the duration of the current run."""
        self._run_began += secs

    def _update_peaks(self) -> None:
        self._peaks.update(peak_memory_of_ranks(self._ranks or (), collective.current().rank))

    def note_memory(self, step: int) -> None:
        """Records the peak memory of the ranks; only for rank 0."""
        self._update_peaks()
        gpu = peak_gpu_memory()
        self._history.note_facts(step, memory_bytes=self._peaks, gpu_memory_bytes=None if gpu is None else {0: gpu})

    @_run_only_on_rank_0
    def write_facts(self, options) -> None:
        """Writes `report.json` and `run.toml`."""
        ranks = collective.current()
        known = [_describe_this_rank()] if ranks.size == 1 else [{} for _ in range(ranks.size)]
        gpus = [device.name for device in tf.config.list_physical_devices("GPU")]
        path = os.path.join(self.folder, OPTIONS_FILE)
        NonFatalOutput(f"{path}, this training's options,").attempt(
            page.note_options, self.folder, self._config, options
        )
        page.note_run(self.folder, self._history.path, options, self._ranks or known, gpus)

    @_run_only_on_rank_0
    def write_report(self, stream: TextIO | None, step: int) -> None:
        """Writes `report.html` if there was a step, and prints the last lines of the training if there is a stream."""
        if not self._history.rows:
            return
        self.note_memory(step)
        made = page.write_page(self.folder, history=self._history)
        secs = time.monotonic() - self._began
        lines = format_ending(self._history, (self._start, step), secs, self._times, self._steps_per_run, made)
        choose_output(stream).note("\n".join(lines[:1] if self._is_brief else lines))


def places_of_ranks() -> list[dict[str, Any]]:
    """Returns host, device, cores and process of each rank, in rank order.

    Ranks: collective; every rank gets the whole list.
    """
    return gather_values(_describe_this_rank(), "report_places_of_ranks")


def _describe_this_rank() -> dict[str, Any]:
    place = {"host": socket.gethostname()[:100], "cores": usable_cores(), "process": os.getpid()}
    device = environment.read_variable("ASCEND_DEVICE_ID")
    return {**place, "device": device[:20]} if device else place
