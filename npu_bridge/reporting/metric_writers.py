"""Writes metrics to a CSV file, to MLflow and to Weights & Biases.

A writer has three methods, which `MetricsHook` and `MetricsCallback` call on rank 0: `begin(step)` before the first
step of a session; `write(step, values, precision)` with the known finite numbers by name, and the dtype of the step or
None; and `close()` at the end. A writer class of your own needs only these three methods. If a method raises an
OSError, or an exception in the tuple `failures` of your class, the training continues without this output.
"""

from __future__ import annotations

import csv
import functools
import io
import os
import re
from collections.abc import Mapping
from typing import Any

from npu_bridge.base.files import NotOursError, new_file
from npu_bridge.base.reading import open_file
from npu_bridge.base.secondary_files import GrowingFile
from npu_bridge.reporting.errors import import_optional

_NUMBERS = ("loss", "loss_scale", "skipped_steps", "learning_rate", "gradient_norm", "steps_per_sec")
_COLUMNS = ("step", *_NUMBERS, "precision")
_FILES = b"^" + ",".join(_COLUMNS).encode() + rb"\r?\n"  # how these files begin
_PREFIX = "training"
_NUMBER = re.compile(r"\d{1,18}", re.ASCII)


class CsvWriter:
    """A writer of a CSV file with a line for each entry.

    A resumed training first deletes the lines of steps that it will repeat.

    Args:
      path: the file, whose first line has the column names. Missing folders are made.
    """

    def __init__(self, path: str):
        self.path = os.fspath(path)
        self._file: Any = None  # a GrowingFile from `begin` to `close`

    def begin(self, step: int) -> None:
        """Opens the file and keeps its lines up to `step`. If the file cannot be opened, the next entry tries again.

        Raises:
          FileExistsError: the file has other columns; it is not changed.
        """
        self.close()
        made = GrowingFile(self.path, "the file of numbers", functools.partial(self._drop_rows_after, step))
        try:
            made.open()
        except NotOursError:
            raise
        except OSError:
            made.write(b"")  # logs the reason
        self._file = made

    def _drop_rows_after(self, step: int) -> None:
        kept = _read_rows_until(step, self.path)
        with new_file(self.path, own_content_pattern=_FILES) as file:
            csv.writer(file).writerows([_COLUMNS, *kept])

    def write(self, step: int, values: Mapping[str, float], precision: str | None) -> None:
        """Adds a line, with empty fields for unknown numbers."""
        numbers = [f"{values[name]:.9g}" if name in values else "" for name in _NUMBERS]
        line = io.StringIO()
        csv.writer(line).writerow([step, *numbers, precision or ""])
        self._file.write(line.getvalue().encode())

    def close(self) -> None:
        """Closes the file."""
        if self._file is not None:
            self._file.close()
            self._file = None


class MlflowWriter:
    """A writer of metrics `training/...` to the active MLflow run, or to a new run that ends with the training.

    Args:
      **run: arguments of `mlflow.start_run` for a new run, such as `run_name`.
    Raises:
      MissingExtraError: MLflow is not installed.
    """

    failures = (Exception,)  # a server can fail in many ways

    def __init__(self, **run: Any):
        self._mlflow = import_optional("mlflow", "MlflowWriter", "mlflow")
        self._run = run
        self._is_own = False
        self._precision: str | None = None

    def begin(self, step: int) -> None:
        """Starts a run if none is active."""
        self._precision = None
        if self._mlflow.active_run() is None:
            self._mlflow.start_run(**self._run)
            self._is_own = True

    def write(self, step: int, values: Mapping[str, float], precision: str | None) -> None:
        """Logs the numbers; the precision becomes a tag of the run."""
        self._mlflow.log_metrics({f"{_PREFIX}/{name}": value for name, value in values.items()}, step=step)
        if precision not in (None, self._precision):
            self._precision = precision
            self._mlflow.set_tag(f"{_PREFIX}/precision", precision)

    def close(self) -> None:
        """Ends the run if this writer started it."""
        if self._is_own:
            self._mlflow.end_run()
            self._is_own = False


class WandbWriter:
    """A writer of metrics `training/...` to the active run of Weights & Biases, or to a run for this training.

    Args:
      **run: arguments of `wandb.init` for a new run, such as `project` and `mode="offline"`.
    Raises:
      MissingExtraError: wandb is not installed.
    """

    failures = (Exception,)  # as for MLflow

    def __init__(self, **run: Any):
        self._wandb = import_optional("wandb", "WandbWriter", "wandb")
        self._run = run
        self._own_run = None

    def begin(self, step: int) -> None:
        """Starts a run if none is active, and makes the global step the x-axis of the metrics."""
        if self._wandb.run is None:
            self._own_run = self._wandb.init(**self._run)
        self._wandb.define_metric(f"{_PREFIX}/step")
        self._wandb.define_metric(f"{_PREFIX}/*", step_metric=f"{_PREFIX}/step")

    def write(self, step: int, values: Mapping[str, float], precision: str | None) -> None:
        """Logs the numbers and the precision."""
        known = {"step": step, **values, **({"precision": precision} if precision else {})}
        self._wandb.log({f"{_PREFIX}/{name}": value for name, value in known.items()})

    def close(self) -> None:
        """Ends the run if this writer started it."""
        if self._own_run is not None:
            self._own_run.finish()
            self._own_run = None


def _read_rows_until(step: int, path: str) -> list[list[str]]:
    if not os.path.exists(path):
        return []
    with open_file(path, newline="", errors="replace") as file:
        rows = [row for row in csv.reader(file) if len(row) == len(_COLUMNS) and _NUMBER.fullmatch(row[0])]
    return [row for row in rows if int(row[0]) <= step]
