"""Reads how a job starts, from a JSON file that describes the start, or else from environment variables.

The file has `device_info` with the `Index` of this process, `rank_table_file`, `rank_size` and optionally
`local_checkpoint_dir`. The launcher determines the ranks, so only the checkpoint and the number of ranks are used here.
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
    """The start of a job.

    Attributes:
      restore_from: checkpoint or folder to start from; None for the initial values of the model.
      origin: the variable or file that named the checkpoint, for messages.
      rank_size: number of ranks that the job-start file states; None without such a file.
    """

    restore_from: str | None
    origin: str
    rank_size: int | None = None


def read_job_start(job_start_file: str | os.PathLike | None = None) -> JobStart:
    """Reads the start of a job.

    Args:
      job_start_file: the file, whose field `local_checkpoint_dir` names the checkpoint. If there is no readable file,
        the environment variable `LOCAL_CHECKPOINT_DIR` is read. If this source names no checkpoint, `RESTORE_FROM` is
        read.
    Raises:
      ValueError: the file is not a JSON object, or a field is missing or too small.
      TypeError: a number in the file is not an int.
    """
    from_file = _read_file(job_start_file) if job_start_file else None
    if from_file is not None:
        origin = f"local_checkpoint_dir of {os.fspath(job_start_file)}"
        rank_size, checkpoint = from_file
    else:
        origin = "LOCAL_CHECKPOINT_DIR"
        rank_size, checkpoint = None, environment.read_variable(origin)
    if not checkpoint:
        origin = "RESTORE_FROM"
        checkpoint = environment.read_variable(origin)
    return JobStart(checkpoint, origin, rank_size)


def _read_file(path: str | os.PathLike) -> tuple[int, str | None] | None:
    """Returns the number of ranks and the checkpoint from a file; None if the file cannot be read."""
    where = f"job start file {os.fspath(path)}"
    try:
        content = read_json(path)
    except OSError as error:
        problem, fix = "it cannot be read", "Correct the path or leave it out; the environment is used instead."
        _LOG.warning("%s", message(where, problem, "a JSON file", error, fix))
        return None
    except ValueError as error:
        raise ValueError(message(where, "it is not JSON", "a JSON object", error, "Correct it.")) from error
    device = _required_field(content, "device_info", where)
    in_device = f"{where}, device_info"
    check_count(in_device, "Index", _required_field(device, "Index", in_device), "Correct it.", at_least=0)
    _required_field(content, "rank_table_file", where)
    rank_size = check_count(where, "rank_size", _required_field(content, "rank_size", where), "Correct it.")
    checkpoint = content.get("local_checkpoint_dir")
    if not isinstance(checkpoint, (str, type(None))):
        problem, fix = "local_checkpoint_dir is not a path", "Write it as text."
        raise TypeError(message(where, problem, "a string", shown(checkpoint), fix))
    return rank_size, checkpoint


def _required_field(parent, name, source):
    if not isinstance(parent, dict) or parent.get(name) is None:
        raise ValueError(message(source, f"{name} is missing", f"an object with {name}", shown(parent), "Add it."))
    return parent[name]
