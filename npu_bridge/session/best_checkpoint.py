"""Defines `BestCheckpoint`, which keeps a copy of the best checkpoint of `tf.estimator.train_and_evaluate`."""

from __future__ import annotations

import contextlib
import json
import math
import numbers
import os
import re
from typing import Any

import tensorflow as tf

from npu_bridge.base.errors import did_you_mean, message
from npu_bridge.base.files import remove_own_files, write_atomically
from npu_bridge.base.secondary_files import NonFatalOutput
from npu_bridge.session.damaged_checkpoints import list_checkpoints

_NOTE = "best.json"
_COPY = re.compile(r"(model\.ckpt-\d+)\.(index|meta|data-\d+-of-\d+)")


class BestCheckpoint(tf.estimator.Exporter):
    """An exporter that keeps a copy of the best checkpoint so far, and no other, in `MODEL_DIR/export/NAME`.

    It is used like `tf.estimator.BestExporter`, but copies a checkpoint instead of exporting a model.
    `tf.train.latest_checkpoint` finds the copy. The file `best.json` next to it holds the step and the metrics of the
    evaluation; a resumed training compares with these metrics.

    Args:
      metric: the metric of the evaluation to compare.
      is_smaller_better: False for a metric that is better if it is larger, such as an accuracy.
      name: name of the folder.
    Raises:
      ValueError: `name` is empty; an evaluation has no number named `metric`.
    Example:
      >>> exporters = [BestCheckpoint(metric="accuracy", is_smaller_better=False)]
      >>> spec = tf.estimator.EvalSpec(eval_input_fn, steps=None, throttle_secs=0, exporters=exporters)
    """

    def __init__(self, metric: str = "loss", is_smaller_better: bool = True, name: str = "best"):
        if not name:
            fix = "Leave name out, or give the name of a folder."
            raise ValueError(message("BestCheckpoint", "name is empty", "the name of a folder", repr(name), fix))
        self._name, self._metric, self._sign = name, metric, 1.0 if is_smaller_better else -1.0

    @property
    def name(self) -> str:
        return self._name

    def export(self, estimator, export_path, checkpoint_path, eval_result, is_the_final_export):
        """Copies the checkpoint if its evaluation is the best so far; returns the path of the copy, or None."""
        current = self._metric_value(eval_result)
        best = (_read_best_metrics(export_path) or {}).get(self._metric, math.nan)  # missing after a change of metric
        if not (self._sign * current < self._sign * best or math.isnan(best)):
            return None
        what = NonFatalOutput(f"the best checkpoint in {export_path}", (tf.errors.OpError,))
        copied = os.path.join(export_path, os.path.basename(checkpoint_path))
        return (
            copied if what.attempt(_replace_copy, checkpoint_path, copied, eval_result, is_last_chance=True) else None
        )

    def _metric_value(self, result):
        if self._metric not in result:
            fix = did_you_mean(self._metric, result, "") or "Give one of these names as metric."
            expected = f"one of {', '.join(sorted(result))}"
            problem = "the evaluation has no such metric"
            raise ValueError(message("BestCheckpoint", problem, expected, f"metric={self._metric!r}", fix))
        return float(result[self._metric])


def _read_best_metrics(folder) -> dict[str, Any] | None:
    """Returns the metrics of the kept checkpoint; None if the folder has none that can be read."""
    path = os.path.join(folder, _NOTE)
    if not tf.io.gfile.exists(path):
        return None
    # An earlier version could leave a part of the note.
    with tf.io.gfile.GFile(path) as file, contextlib.suppress(ValueError):
        note = json.load(file)
        if tf.io.gfile.exists(os.path.join(folder, f"{note['checkpoint']}.index")):
            return note["metrics"]
    return None


def _replace_copy(source, target, metrics_and_step):
    """Replaces the kept checkpoint; readers find the old or the new checkpoint, never a part of one."""
    folder = os.path.dirname(target)
    tf.io.gfile.makedirs(folder)
    for file in tf.io.gfile.glob(f"{source}.*"):
        tf.io.gfile.copy(file, target + file[len(source) :], overwrite=True)
    list_checkpoints(folder, [target])
    metrics = {name: float(value) for name, value in sorted(metrics_and_step.items()) if _is_number(value)}
    note = {"step": int(metrics.pop("global_step", 0)), "metrics": metrics, "checkpoint": os.path.basename(target)}
    text = json.dumps(note, indent=1) + "\n"
    if "://" in folder:
        with tf.io.gfile.GFile(os.path.join(folder, _NOTE), "w") as file:
            file.write(text)
        return
    write_atomically(os.path.join(folder, _NOTE), text)
    for name in tf.io.gfile.listdir(folder):
        found = _COPY.fullmatch(name)
        if found and found.group(1) != os.path.basename(target):
            remove_own_files(os.path.join(folder, name), lambda path, stat: True)


def _is_number(value):
    return isinstance(value, numbers.Number) or getattr(value, "shape", None) == ()
