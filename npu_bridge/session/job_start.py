"""Chooses the checkpoint to warm-start from: given by the caller, the job file or an environment variable."""

from __future__ import annotations

import os
from typing import Any

import tensorflow as tf

from npu_bridge import collective
from npu_bridge.base.errors import message
from npu_bridge.base.terminal import logger
from npu_bridge.options import JobStart

_LOG = logger(__name__)


def choose_start(warm_start_from: Any, job: JobStart) -> Any:
    """Returns the checkpoint from which a training starts: the script's choice if it makes one, else the job's.

    Returns:
      `warm_start_from`, or the path from the job: a checkpoint, a folder with checkpoints, or the folder of a saved
      model. None if neither is given.
    Raises:
      ValueError: the path from the job holds no checkpoint.
      RuntimeError: the job file is for another number of ranks.
    """
    if job.rank_size is not None and job.rank_size != collective.current().size:
        size = collective.current().size
        fix = f"Start the script with `npu-run -np {job.rank_size} script.py`, or correct the file."
        problem = "rank_size is not the number of ranks"
        raise RuntimeError(message("job start file", problem, str(size), str(job.rank_size), fix))
    if warm_start_from or job.restore_from is None:
        return warm_start_from or None
    if not _holds_checkpoint(job.restore_from):
        expected, fix = "a checkpoint, or a folder with one", "Correct it, or unset it to start from initial values."
        raise ValueError(
            message("job start", f"{job.origin} names no checkpoint", expected, repr(job.restore_from), fix)
        )
    _LOG.info("Training starts from %s, as %s says.", job.restore_from, job.origin)
    return job.restore_from


def _holds_checkpoint(path):
    of_saved_model = os.path.join(path, "variables", "variables.index")
    is_found = tf.io.gfile.exists(f"{path}.index") or tf.io.gfile.exists(of_saved_model)
    return is_found or tf.train.latest_checkpoint(path) is not None
