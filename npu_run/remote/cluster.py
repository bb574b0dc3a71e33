"""Finds out which task of a cluster this process is, from variables of Open MPI, PMI, Slurm or Kubernetes."""

from __future__ import annotations

from typing import NamedTuple

from npu_bridge.base.environment import read_integer, read_variable

# Variables with the number of a task, the number of tasks, of tasks on this machine (the same if all are on it), and an
# identifier of the job. Slurm also starts the daemons of other launchers, so those launchers come first.
_CLUSTERS = (
    ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_SIZE", ("PMIX_NAMESPACE",)),
    ("PMI_RANK", "PMI_SIZE", "MPI_LOCALNRANKS", ("PMI_JOBID",)),
    ("SLURM_PROCID", "SLURM_STEP_NUM_TASKS", "SLURM_STEP_TASKS_PER_NODE", ("SLURM_JOB_ID", "SLURM_STEP_ID")),
    ("JOB_COMPLETION_INDEX", "NPU_RUN_TASKS", "", ("NPU_RUN_FIRST",)),
)


class ClusterTask(NamedTuple):
    """The position of this process among the processes that a cluster started with the same command.

    Attributes:
      number: position of this process, from 0.
      count: number of these processes, at least 2.
      is_local: whether all these processes are known to be on one machine.
      job: a text shared by these processes only; "" if no variable identifies the job.
    """

    number: int
    count: int
    is_local: bool
    job: str


def cluster_task() -> ClusterTask | None:
    """Returns the task of this process if Open MPI, a PMI launcher, Slurm's srun or Kubernetes started several.

    Returns:
      None if this is the only task, if no variable describes tasks, or if each task is a rank already, which
      HOROVOD_RANK or HOROVOD_CONTROLLER=mpi shows.
    Raises:
      ValueError: a variable is not a non-negative integer.
    """
    if read_variable("HOROVOD_RANK") or (read_variable("HOROVOD_CONTROLLER") or "").lower() == "mpi":
        return None
    for number_name, count_name, local_name, job_names in _CLUSTERS:
        number, count = read_integer(number_name), read_integer(count_name)
        if number is not None and count is not None:
            names = [read_variable(name) or "" for name in job_names]
            is_local = bool(local_name) and read_variable(local_name) == read_variable(count_name)
            return (
                ClusterTask(number, count, is_local, "-".join(names) if all(names) else "")
                if number < count > 1
                else None
            )
    return None
