"""Finds the communicator of this process."""

from __future__ import annotations

import sys

from npu_bridge.base import environment
from npu_bridge.collective.engines.communicator import Communicator
from npu_bridge.collective.engines.engine_of_ranks import choose_engine
from npu_bridge.collective.engines.single_process import SingleProcess


def current() -> Communicator:
    """Returns the communicator of this process, chosen anew at each call.

    If a launcher has started several ranks, the engine is Horovod or TensorFlow's own collectives, as `NPU_COLLECTIVES`
    chooses. If the script itself has initialised Horovod with several ranks, the engine is Horovod. Otherwise the
    communicator is a `SingleProcess`.

    Raises:
      RuntimeError: Horovod does not join the processes of a launcher, or the environment declares another rank or
        number of ranks than the job has. Training with fewer ranks would give another result.
      ValueError: variables that describe the cluster contradict each other.
      HorovodUnavailableError: several ranks were started, but Horovod cannot be used.
    """
    launched = environment.launcher_placement()
    are_several = launched is not None and launched.size > 1
    communicator: Communicator
    if are_several and choose_engine() == "tensorflow":
        from npu_bridge.collective.engines.tensorflow_ranks import TensorFlowCommunicator

        communicator = TensorFlowCommunicator()
    elif are_several or _script_started_horovod():
        from npu_bridge.collective.engines.horovod_ranks import HorovodCommunicator

        communicator = HorovodCommunicator()
    else:
        communicator = SingleProcess()
    if are_several and communicator.size == 1 and not environment.is_flag_on("HOROVOD_ELASTIC"):
        raise RuntimeError(
            f"npu_bridge.collective: a launcher has started {launched.size} processes, but Horovod does not join them, "
            f"as it is built without MPI. Expected {launched.size} ranks; got 1. Write npu-run in place of python, or "
            f"start the job with npu-run alone."
        )
    _check_declared_place(communicator)
    return communicator


def rank_and_size_of_job() -> tuple[int, int]:
    """Returns this process's rank and the number of ranks, without starting Horovod.

    Raises:
      ValueError: variables of the launcher contradict each other.
    """
    launched = environment.launcher_placement()
    if launched is not None and launched.size > 1:
        return launched.rank, launched.size
    if _script_started_horovod():
        hvd = sys.modules["horovod.tensorflow"]
        return hvd.rank(), hvd.size()
    return 0, 1


def _script_started_horovod():
    """Returns whether the script has started Horovod with several ranks, under a launcher unknown to this package."""
    hvd = sys.modules.get("horovod.tensorflow")
    return hvd is not None and hvd.is_initialized() and hvd.size() > 1


def _check_declared_place(communicator):
    """Raises an error if a script that reads its rank and the number of ranks itself would read other numbers."""
    environment.check_cluster_variables()
    declared, size = environment.declared_world_size(), communicator.size
    if declared != size and (declared > 1 or environment.read_variable("RANK_SIZE")):
        raise RuntimeError(
            f"npu_bridge.collective: the environment declares another number of ranks than the job has. Expected "
            f"RANK_SIZE (or CM_WORKER_SIZE) = {size}; got {declared}. Start the script with "
            f"`npu-run -np {declared} script.py`, or unset the variable for {size} ranks."
        )
    rank = environment.declared_rank() if size > 1 else None
    if rank not in (None, communicator.rank):
        raise RuntimeError(
            f"npu_bridge.collective: the environment declares another rank than the job has given. Expected "
            f"RANK_ID = {communicator.rank}; got {rank}. Unset RANK_ID before the job starts."
        )
