"""Reads the facts about a job's start: from a JSON file that describes it, else from environment variables.

The file has `device_info` with the `Index` of this process, `rank_table_file`, `rank_size` and optionally
`local_checkpoint_dir`. The launcher determines the ranks; only the checkpoint and the number of ranks are used here.
"""

from __future__ import annotations

import os
from typing import NamedTuple

from npu_bridge.base import environment
from npu_bridge.base.arguments import check_count
from npu_bridge.base.errors import message, shown
from npu_bridge.base.reading import read_json
from npu_bridge.base.terminal import logger

_LOG = logger(__name__)


class JobStart(NamedTuple):
    """The facts about a job's start.

    Attributes:
      restore_from: checkpoint or folder to start from; None for the initial values of the model.
      origin: the variable or file that named it, for messages.
      rank_size: number of ranks in the file; None without a file.
    """

    restore_from: str | None
    origin: str
    rank_size: int | None = None


def read_job_start(job_start_file: str | os.PathLike | None = None) -> JobStart:
    """Reads where a job starts.

    Args:
      job_start_file: the file. If there is none, or it cannot be read, `LOCAL_CHECKPOINT_DIR` replaces its
        `local_checkpoint_dir`; `RESTORE_FROM` is the last resort.
    Raises:
      ValueError: the file is not a JSON object, or a field is missing or too small.
      TypeError: a number in it is not an int.
    """
    of_file = _read(job_start_file) if job_start_file else None
    if of_file is not None:
        origin = f"local_checkpoint_dir of {os.fspath(job_start_file)}"
        rank_size, checkpoint = of_file
    else:
        origin = "LOCAL_CHECKPOINT_DIR"
        rank_size, checkpoint = None, environment.read_variable(origin)
    if not checkpoint:
        origin = "RESTORE_FROM"
        checkpoint = environment.read_variable(origin)
    return JobStart(checkpoint, origin, rank_size)


def _read(path: str | os.PathLike) -> tuple[int, str | None] | None:
    """Returns the number of ranks and the checkpoint; None when there is no such file."""
    where = f"job start file {os.fspath(path)}"
    try:
        content = read_json(path)
    except OSError as error:
        problem, fix = "it cannot be read", "The environment is used instead; correct the path or leave it out."
        _LOG.warning("%s", message(where, problem, "a JSON file", error, fix))
        return None
    except ValueError as error:
        raise ValueError(message(where, "it is not JSON", "a JSON object", error, "Correct it.")) from error
    device = _field(content, "device_info", where)
    in_device = f"{where}, device_info"
    check_count(in_device, "Index", _field(device, "Index", in_device), "Correct it.", at_least=0)
    _field(content, "rank_table_file", where)
    rank_size = check_count(where, "rank_size", _field(content, "rank_size", where), "Correct it.")
    checkpoint = content.get("local_checkpoint_dir")
    if not isinstance(checkpoint, (str, type(None))):
        problem, fix = "local_checkpoint_dir is not a path", "Write it as text."
        raise TypeError(message(where, problem, "a string", shown(checkpoint), fix))
    return rank_size, checkpoint


def _field(parent, name, where):
    if not isinstance(parent, dict) or parent.get(name) is None:
        raise ValueError(message(where, f"{name} is missing", f"an object with {name}", shown(parent), "Add it."))
    return parent[name]
