"""Gives the numbers of a training to a writer every few steps: a hook for sessions, and a callback for Keras."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping
from typing import Any, Callable

import tensorflow as tf

from npu_bridge import collective
from npu_bridge.base.arguments import check_count
from npu_bridge.base.secondary_files import Secondary
from npu_bridge.gradients.arithmetic import sum_in_order, values_of
from npu_bridge.gradients.collections import gradients_of
from npu_bridge.reporting.keras_numbers import Numbers
from npu_bridge.reporting.step_hook import Observation, StepHook
from npu_bridge.session import steps_per_run

_NORM = "gradient_norm"


class MetricsHook(StepHook):
    """Gives a writer loss, loss scale, skipped steps, learning rate, steps per second, gradient norm and precision.

    The norm is that of the gradients as they are applied: averaged, unscaled, clipped. A skipped step has none, and
    neither have the steps of `iterations_per_loop` above 1, of which a run shows only the last.

    Args:
      writer: such as a `CsvWriter`; `metric_writers.py` says what it takes to be one.
      every_n_steps: steps between two entries; the first step has one, too.
      loss: tensor or name, see `StepHook`.
      clock: seconds, never going backwards.
    Raises:
      ValueError: `every_n_steps` is below 1.
    Graph: the operators of the norm, which run only in steps that are written.
    Ranks: local; only rank 0 writes.
    """

    def __init__(
        self,
        writer: Any,
        every_n_steps: int = 100,
        loss: tf.Tensor | str | None = None,
        clock: Callable[[], float] = time.monotonic,
    ):
        super().__init__(loss)
        self._entries = _Entries(type(self).__name__, writer, every_n_steps, clock)
        self._norm = None
        self._last_norm: float | None = None
        self._loops = False
        self._skipped = 0

    def begin(self):
        """Looks up tensors and rank."""
        super().begin()
        self._entries.begin()
        gradients = gradients_of(tf.compat.v1.get_default_graph()) if self._entries.writes else []
        with tf.name_scope("gradient_norm"):
            self._norm = _norm(gradients) if gradients else None
        self._skipped = 0

    def after_create_session(self, session, coord):
        """Sees whether a run is a step."""
        del coord
        self._loops = steps_per_run(session) > 1
        if self._entries.writes:
            self._entries.start(self.read_step(session))

    def before_run(self, run_context):
        """Asks for the tensors on the rank that writes, and for the norm when it is to be written."""
        if not self._entries.writes:
            return None
        wanted = dict(self._fetches)
        if self._norm is not None and not self._loops and self._entries.is_due:
            wanted[_NORM] = self._norm
        return tf.estimator.SessionRunArgs(wanted)

    def after_run(self, run_context, run_values):
        """Keeps the norm for `on_step`."""
        if self._entries.writes:
            norm = (run_values.results or {}).get(_NORM)
            self._last_norm = None if norm is None else float(norm)
            super().after_run(run_context, run_values)

    def on_step(self, session, observation: Observation) -> None:
        """Writes an entry when one is due."""
        self._skipped += observation.skipped
        if self._entries.is_due:
            values = {
                "loss": observation.loss,
                "loss_scale": observation.loss_scale,
                "skipped_steps": self._skipped if "skipped" in self._fetches else None,
                "learning_rate": observation.learning_rate,
                _NORM: self._last_norm,
            }
            step = self.read_step(session)
            self._entries.write(step, step + self._skipped, values, observation.precision)
        self._entries.count(steps_per_run(session))

    def end(self, session):
        """Sees that everything is written."""
        del session
        self._entries.close()


class MetricsCallback(tf.keras.callbacks.Callback):
    """The same numbers for `model.fit`, but for the gradient norm, which Keras does not show.

    Args:
      writer: as for `MetricsHook`.
      every_n_steps: batches between two entries; the first batch has one, too.
      clock: seconds, never going backwards.
    Raises:
      ValueError: `every_n_steps` is below 1.
    Ranks: local; only rank 0 writes.
    Example:
      model.fit(dataset, callbacks=npu_callbacks_append([MetricsCallback(CsvWriter("out/numbers.csv"))]))
    """

    def __init__(self, writer: Any, every_n_steps: int = 100, clock: Callable[[], float] = time.monotonic):
        super().__init__()
        self._entries = _Entries(type(self).__name__, writer, every_n_steps, clock)

    def on_train_begin(self, logs=None):
        self._entries.begin()
        if self._entries.writes:
            self._entries.start(Numbers.of(self.model.optimizer).step)

    def on_train_batch_end(self, batch, logs=None):
        if not self._entries.writes:
            return
        if self._entries.is_due:
            now = Numbers.of(self.model.optimizer)
            values = {**now._asdict(), "loss": (logs or {}).get("loss")}
            step = values.pop("step")
            self._entries.write(step, step + (now.skipped_steps or 0), values)
        self._entries.count(1)

    def on_train_end(self, logs=None):
        self._entries.close()


class _Entries:
    """Hands named numbers of a step to a writer when they are due."""

    def __init__(self, owner: str, writer: Any, every_n_steps: int, clock: Callable[[], float]):
        check_count(owner, "every_n_steps", every_n_steps, "Leave it out for 100.")
        self._writer = writer
        failures = (tf.errors.OpError, *getattr(writer, "failures", ()))
        self._secondary = Secondary(f"the output of {type(writer).__name__}", failures)
        self._has_begun = False
        self.writes = False
        self._every_n_steps = every_n_steps
        self._clock = clock
        self._steps_since = every_n_steps
        self._before: tuple[float, float] | None = None

    def start(self, step: int) -> None:
        """Has the writer begin at a step."""
        self._has_begun = False
        self._secondary.attempt(self._begin, step, now=True)

    def _begin(self, step: int) -> None:
        self._writer.begin(step)
        self._has_begun = True

    def _write(self, step: int, values: dict[str, float], precision: str | None) -> None:
        if not self._has_begun:
            self._begin(step)
        self._writer.write(step, values, precision)

    def begin(self) -> None:
        self.writes = collective.current().rank == 0
        self._steps_since = self._every_n_steps  # the first step is written
        self._before = None

    @property
    def is_due(self) -> bool:
        return self.writes and self._steps_since >= self._every_n_steps

    def count(self, steps: int) -> None:
        if self._steps_since >= self._every_n_steps:
            self._steps_since = 0
        self._steps_since += steps

    def write(self, step: int, tried: float, values: Mapping[str, float | None], precision: str | None = None) -> None:
        """Writes what is known and finite, and how many steps were tried in a second since the last time."""
        now = self._clock()
        pace = None
        if self._before is not None and now > self._before[1]:
            pace = (tried - self._before[0]) / (now - self._before[1])
        self._before = (tried, now)
        known = {**values, "steps_per_sec": pace}
        finite = {name: float(value) for name, value in known.items() if value is not None and math.isfinite(value)}
        self._secondary.attempt(self._write, step, finite, precision)

    def close(self) -> None:
        if self.writes:
            self._secondary.attempt(self._writer.close, now=True)


def _norm(gradients):
    """The global norm; in float32, also of 16-bit gradients."""
    return tf.sqrt(2.0 * sum_in_order([tf.nn.l2_loss(tf.cast(values_of(grad), tf.float32)) for grad in gradients]))
