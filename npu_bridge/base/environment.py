"""Reads and writes environment variables, and holds their names; only the launcher also passes on an environment.

Two families of variables describe a run from outside: those that a launcher sets (Horovod's own, Open MPI's, or a PMI
launcher's) and the documented ones of the NPU stack (`RANK_ID`, `RANK_SIZE`, `RANK_TABLE_FILE`, ...). Every function
reads the environment when it is called and keeps nothing. `options/environment_table.py` describes each documented
variable.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import re
from collections.abc import Mapping
from contextlib import AbstractContextManager
from typing import Any, Callable, NamedTuple

from npu_bridge.base.equal_blocks import EqualBlocks
from npu_bridge.base.errors import message


class Placement(NamedTuple):
    """The rank of a process that a launcher started.

    Attributes:
      rank: position among all processes, from 0.
      size: number of processes.
      local_rank: position among the processes of this machine, from 0.
      local_size: number of processes on this machine.
    """

    rank: int
    size: int
    local_rank: int
    local_size: int


RESTARTS = "NPU_RUN_RESTARTS"  # how often npu-run restarts a failed job; unset if it does not
MEMORY_FOLDER = "NPU_RUN_MEMORY_FOLDER"  # where a restartable job keeps state in memory; unset otherwise
BEGAN = "NPU_RUN_BEGAN"  # when npu-run first started the job, in seconds since 1970; set from the first restart on
START = "NPU_RUN_START"  # job:number:numbers of this start, and of earlier ones that might still run
IMPOSED_OPTIONS = "NPU_RUN_OPTIONS"  # options that npu-run sets in place of the script, as JSON
SETTINGS = "NPU_RUN_SET"  # the NAME=VALUE of npu-run --set, as a JSON list
SETTINGS_READ = "NPU_RUN_SET_READ"  # 1 once an NPURunConfig of this process has read NPU_RUN_SET
COLLECTIVES = "NPU_COLLECTIVES"  # horovod or tensorflow, which npu-run --collectives sets
OPEN_PORTS = "NPU_ALLOW_OPEN_PORTS"  # 1, which npu-run --allow-open-ports sets
VERBOSE = "NPU_BRIDGE_VERBOSE"  # 1: show everything that TensorFlow prints
# The variables that `fill_rank_variables` sets for each rank.
RANK_VARIABLES = ("RANK_ID", "RANK_SIZE", "DEVICE_ID", "ASCEND_DEVICE_ID", "DEVICE_INDEX", "JOB_ID")
DEVICE_VARIABLES = ("ASCEND_DEVICE_ID", "DEVICE_ID")  # the first that is set counts
ENGINES = ("horovod", "tensorflow")  # the engines with which several ranks can exchange tensors
_BLOCKS = EqualBlocks(os.environ)
_JOB = 10087  # the number that launch scripts for NPUs give their only job
_LAUNCHERS = (
    ("HOROVOD_RANK", "HOROVOD_SIZE", "HOROVOD_LOCAL_RANK", "HOROVOD_LOCAL_SIZE"),
    ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_RANK", "OMPI_COMM_WORLD_LOCAL_SIZE"),
    ("PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS"),
)
VISIBLE_GPUS = "CUDA_VISIBLE_DEVICES"
FIRST_TASK = "NPU_RUN_FIRST"  # host:port of the first task, in place of a file in a shared folder
JOB_SECRET = "NPU_RUN_SECRET"  # by which tasks recognise each other if NPU_RUN_FIRST is set
_CHIEF_VARIABLES = ("CM_CHIEF_IP", "CM_CHIEF_PORT", "CM_CHIEF_DEVICE")
_CLUSTER_MANAGER_VARIABLES = (*_CHIEF_VARIABLES, "CM_WORKER_SIZE", "CM_WORKER_IP")


def read_variable(name: str) -> str | None:
    """Returns the text of a variable, or None when it is unset or empty."""
    return os.environ.get(name) or None


def read_positive_number(name: str, default: int, unit: str) -> int:
    """Reads a whole number from a variable, from 1 to 2**63 - 1; returns `default` if the variable is unset.

    Args:
      unit: the name of the counted things, for the message.
    Raises:
      ValueError: the variable has another text.
    """
    text = read_variable(name) or str(default)
    number = parse_whole_number(text)
    if not number:
        expected, fix = f"whole {unit}, 1 to 2**63 - 1", f"Correct it, or unset it for {default}."
        raise _environment_variable_error(f"{name} is not a number of {unit}", expected, repr(text), fix)
    return number


def read_overlapped_steps() -> bool | None:
    """Reads `NPU_OVERLAPPED_STEPS`: whether consecutive steps overlap; None to try both ways and keep the faster one.

    Raises:
      ValueError: the variable is neither 0 nor 1.
    """
    return read_zero_or_one("NPU_OVERLAPPED_STEPS", "to try both ways")


def are_horovod_threads_preferred() -> bool:
    """Reads `NPU_COMMUNICATION_PRIORITY`: whether Horovod's threads have priority over others; by default False.

    Raises:
      ValueError: the variable is neither 0 nor 1.
    """
    return read_zero_or_one("NPU_COMMUNICATION_PRIORITY", "to leave the priorities as they are") is True


def collective_engine() -> str | None:
    """Reads `NPU_COLLECTIVES`: the engine for collectives; None to use Horovod if it is installed.

    Raises:
      ValueError: the variable is neither horovod nor tensorflow.
    """
    text = read_variable(COLLECTIVES)
    if text not in (None, *ENGINES):
        raise _environment_variable_error(
            f"{COLLECTIVES} names no engine", "horovod or tensorflow", repr(text), "Correct it, or unset it."
        )
    return text


def read_zero_or_one(name: str, reason_to_unset: str) -> bool | None:
    """Reads a variable that is 0, 1 or unset (None); raises a ValueError for other values."""
    text = read_variable(name)
    if text not in (None, "0", "1"):
        fix = f"Correct it, or unset it {reason_to_unset}."
        raise _environment_variable_error(f"{name} has an unknown value", "0 or 1", repr(text), fix)
    return None if text is None else text == "1"


def parse_whole_number(text: str) -> int | None:
    """Parses decimal digits; returns None for other text, and for a number that does not fit 64 bits."""
    text = text.strip().lstrip("0") or text.strip()[:1]
    number = int(text) if text.isdecimal() and len(text) < 20 else None
    return number if number is not None and number < 2**63 else None


def write_variable(name: str, value: object) -> None:
    """Sets a variable of this process to `str(value)`; None unsets it."""
    if value is None:
        os.environ.pop(name, None)
    else:
        os.environ[name] = str(value)


def set_variables_temporarily(choose_values: Callable[[], Mapping[str, str]]) -> AbstractContextManager[None]:
    """Sets variables inside the block and restores them afterwards.

    All threads share the environment, so a thread waits until no other is in a block of other values.

    Args:
      choose_values: returns the text of each variable. Call `read_outside_blocks` there to read real values.
    """
    return _BLOCKS.enter(choose_values)


def read_outside_blocks(name: str) -> str | None:
    """Returns the text of a variable before the blocks of `set_variables_temporarily`; None if unset or empty."""
    return _BLOCKS.get_outside(name) or None


def is_flag_on(name: str) -> bool:
    """Returns whether a variable is `1` or `true`; False for any other text, and for an unset variable."""
    return (read_variable(name) or "").strip().lower() in ("1", "true")


def options_set_by_launcher() -> dict[str, Any]:
    """Returns the options, by name, for which the launcher's values replace the script's; usually empty."""
    return json.loads(read_variable(IMPOSED_OPTIONS) or "{}")


def launcher_settings() -> list[str]:
    """Returns each `NAME=VALUE` of `npu-run --set`, in order; usually empty."""
    return json.loads(read_variable(SETTINGS) or "[]")


def launcher_placement() -> Placement | None:
    """Returns the rank that a launcher gave this process, with the number of ranks.

    Reads the variables of Horovod's launcher first, then of Open MPI, then of PMI launchers (MPICH, Intel MPI). Without
    a local rank in these variables or in Slurm's, all processes count as being on one machine.

    Returns:
      The ranks and sizes, or None if no launcher started this process.
    Raises:
      ValueError: a launcher variable is not a non-negative integer, or a rank does not fit its size.
    """
    for rank_name, size_name, local_rank_name, local_size_name in _LAUNCHERS:
        rank, size = read_integer(rank_name), read_integer(size_name)
        if rank is None or size is None:
            continue
        local_rank, local_size = read_integer(local_rank_name), read_integer(local_size_name)
        if local_rank is None or local_size is None:
            local_rank, local_size = _local_place_in_slurm(rank, size) or (rank, size)
        if rank >= size or local_rank >= local_size:
            got = f"rank {rank} of {size}, local rank {local_rank} of {local_size}"
            fix = "Start the job again through its launcher."
            raise _environment_variable_error(
                f"{rank_name} does not fit {size_name}", "ranks below their sizes", got, fix
            )
        return Placement(rank, size, local_rank, local_size)
    return None


def _local_place_in_slurm(rank: int, size: int) -> tuple[int, int] | None:
    """Returns the local rank and size of a task of srun, whose PMI variables lack them; None for other processes."""
    with contextlib.suppress(ValueError, LookupError):
        if (read_integer("SLURM_PROCID"), read_integer("SLURM_STEP_NUM_TASKS")) == (rank, size):
            groups = re.findall(r"(\d+)(?:\(x(\d+)\))?", os.environ["SLURM_STEP_TASKS_PER_NODE"])  # 4(x2),3
            counts = [int(count) for count, times in groups for _ in range(int(times or 1))]
            return int(os.environ["SLURM_LOCALID"]), counts[int(os.environ["SLURM_NODEID"])]
    return None


def leave_outer_job() -> None:
    """Makes this process, if it is a rank, a process that trains alone, for a launcher that starts ranks from here."""
    if launcher_placement() is not None:
        own = RANK_VARIABLES if read_variable("RANK_ID") else ()  # else the user has set the device
        for name in (*own, "HOROVOD_GLOO_RENDEZVOUS_ADDR", "HOROVOD_GLOO_RENDEZVOUS_PORT"):
            os.environ.pop(name, None)
        os.environ.update(zip(_LAUNCHERS[0], ("0", "1", "0", "1")))


def rank_size_text() -> str:
    """Returns the declared number of ranks as text: `RANK_SIZE`, else `CM_WORKER_SIZE`, else "1".

    Raises:
      ValueError: both variables are set.
    """
    rank_size, worker_size = read_variable("RANK_SIZE"), read_variable("CM_WORKER_SIZE")
    if rank_size is not None and worker_size is not None:
        got = f"RANK_SIZE={rank_size!r} and CM_WORKER_SIZE={worker_size!r}"
        raise _environment_variable_error(
            "RANK_SIZE and CM_WORKER_SIZE are both set", "only one variable", got, "Unset one variable."
        )
    return rank_size or worker_size or "1"


def declared_world_size() -> int:
    """Returns the number of ranks that the environment declares; 1 if no variable declares it.

    Text that is not a decimal number counts as 1, as it does on the NPU stack.

    Raises:
      ValueError: `RANK_SIZE` and `CM_WORKER_SIZE` are both set, or the number is below 1.
    """
    text = rank_size_text().strip()
    try:
        size = int(text)
    except ValueError:
        return 1
    if size < 1:
        expected = "RANK_SIZE (or CM_WORKER_SIZE) of at least 1"
        raise _environment_variable_error(
            "the number of ranks is not positive", expected, repr(text), "Unset the variable to train on one rank."
        )
    return size


def declared_rank() -> int | None:
    """Returns this process's rank from `RANK_ID`, or None when it is unset.

    Raises:
      ValueError: `RANK_ID` is not a non-negative integer.
    """
    return read_integer("RANK_ID")


def probable_rank() -> int:
    """Returns this process's rank before Horovod knows it: from the launcher, else from `RANK_ID`, else 0.

    Use it to choose the rank that prints; a malformed variable counts as unset.
    """
    try:
        placed = launcher_placement()
        return placed.rank if placed else declared_rank() or 0
    except ValueError:
        return 0


def declared_device() -> int:
    """Returns the declared device ordinal: `ASCEND_DEVICE_ID`, else `DEVICE_ID`, else 0.

    Raises:
      ValueError: the variable is not a non-negative integer.
    """
    for name in DEVICE_VARIABLES:
        device = read_integer(name)
        if device is not None:
            return device
    return 0


def visible_gpus() -> list[str] | None:
    """Returns the GPUs of CUDA_VISIBLE_DEVICES, up to the first invalid one, as CUDA reads it; None if it is unset."""
    text = os.environ.get(VISIBLE_GPUS)
    if text is None:
        return None
    names = [name.strip() for name in text.split(",")]
    return list(itertools.takewhile(lambda name: name and not name.startswith("-"), names))


def fill_rank_variables(placement: Placement | None) -> None:
    """Sets missing rank variables, which scripts read themselves, from the launcher's variables.

    Sets only those of `RANK_VARIABLES` that are missing. `RANK_SIZE=1`, which shells for one device often set, is
    replaced together with its `RANK_ID`, and on several ranks `DEVICE_INDEX` is replaced. A job declared through `CM_*`
    variables keeps `RANK_ID` and `RANK_SIZE` unset, because the two families exclude each other.

    Args:
      placement: the result of `launcher_placement()`; None leaves the environment unchanged.
    """
    if placement is None:
        return
    device = placement.local_rank
    values = {"DEVICE_ID": device, "ASCEND_DEVICE_ID": device, "DEVICE_INDEX": placement.rank, "JOB_ID": _JOB}
    if not any(read_variable(name) for name in _CLUSTER_MANAGER_VARIABLES):
        values.update(RANK_ID=placement.rank, RANK_SIZE=placement.size)
    replaced = {"RANK_ID", "RANK_SIZE"} if (read_variable("RANK_SIZE") or "").strip() == "1" else set()
    replaced |= {"DEVICE_INDEX"} if placement.size > 1 else set()  # the rank under another name
    for name, value in values.items():
        if name in replaced or not read_variable(name):
            os.environ[name] = str(value)


def check_cluster_variables() -> None:
    """Checks that the variables describing the cluster do not contradict each other.

    Two descriptions exist: a rank table (`RANK_TABLE_FILE` with `RANK_ID` and `RANK_SIZE`) and a chief's address
    (`CM_CHIEF_IP`, `CM_CHIEF_PORT`, `CM_CHIEF_DEVICE`, `CM_WORKER_SIZE`). A job uses at most one of them.

    Raises:
      ValueError: both descriptions are used, the chief's is incomplete, or a number is outside its documented range.
    """
    set_names = [name for name in _CLUSTER_MANAGER_VARIABLES if read_variable(name)]
    for excluded in ("RANK_TABLE_FILE", "RANK_ID", "RANK_SIZE"):
        if set_names and read_variable(excluded):
            expected, fix = "either CM_* variables or RANK_TABLE_FILE, RANK_ID and RANK_SIZE", "Unset one family."
            raise _environment_variable_error(
                f"{excluded} and {', '.join(set_names)} describe the cluster twice", expected, "both families", fix
            )
    for name, largest in (("CM_CHIEF_PORT", 65520), ("CM_WORKER_SIZE", 32768), ("CM_CHIEF_DEVICE", 2**63 - 1)):
        number = read_integer(name)
        if number is not None and number > largest:
            raise _environment_variable_error(
                f"{name} is too large", f"0..{largest}", str(number), "Correct or unset it."
            )
    if read_variable("CM_CHIEF_IP"):
        missing = [name for name in (*_CHIEF_VARIABLES, "CM_WORKER_SIZE") if not read_variable(name)]
        if missing:
            problem, fix = "CM_CHIEF_IP is set but the chief is not fully described", "Set the missing variables."
            raise _environment_variable_error(
                problem, f"{', '.join(_CHIEF_VARIABLES)} and CM_WORKER_SIZE", f"no {', '.join(missing)}", fix
            )
    declared_world_size()


def read_tf_config() -> dict[str, Any]:
    """Returns `TF_CONFIG` as a dictionary; empty when the variable is unset.

    Raises:
      json.JSONDecodeError: (a ValueError) the text is not JSON.
      ValueError: the JSON is not an object, or its task is invalid.
    """
    try:
        parsed = json.loads(read_variable("TF_CONFIG") or "{}")
    except json.JSONDecodeError as error:
        text = f"environment: TF_CONFIG is not JSON. {error.msg}. Correct it or unset it"
        raise json.JSONDecodeError(text, error.doc, error.pos) from error
    if not isinstance(parsed, dict):
        fix = 'Write it as {"cluster": ..., "task": ...} or unset it.'
        raise _environment_variable_error(
            "TF_CONFIG does not describe a cluster", "a JSON object", type(parsed).__name__, fix
        )
    task = parsed.get("task") or {}
    if not isinstance(task, dict) or parse_whole_number(str(task.get("index", 0))) is None:
        expected = 'an object such as {"type": "worker", "index": 0}'
        raise _environment_variable_error(
            "the task of TF_CONFIG is not valid", expected, repr(task), "Correct it or unset TF_CONFIG."
        )
    return parsed


def read_integer(name: str) -> int | None:
    """Returns the whole number in a variable, or None when it is unset or empty.

    Raises:
      ValueError: the variable has another text, or a number above 2**63 - 1.
    """
    text = read_variable(name)
    if text is None:
        return None
    number = parse_whole_number(text)
    if number is None:
        expected = "decimal digits, at most 2**63 - 1"
        raise _environment_variable_error(f"{name} is not a whole number", expected, repr(text), "Correct or unset it.")
    return number


def _environment_variable_error(problem: str, expected: str, got: str, fix: str) -> ValueError:
    return ValueError(message("environment", problem, expected, got, fix))
