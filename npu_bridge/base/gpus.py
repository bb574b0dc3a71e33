"""Chooses the GPU of a rank without starting TensorFlow, which would reserve memory on all GPUs."""

from __future__ import annotations

import contextlib
import ctypes
import itertools
import os
import pathlib
import re

from npu_bridge.base.environment import VISIBLE_GPUS, visible_gpus
from npu_bridge.base.reading import read_text

_MOST_FILES, _MOST_BYTES = 1000, 1 << 20


def usable_gpus(devices: str = "/dev") -> list[str]:
    """Returns the GPUs that a process can use: the names in CUDA_VISIBLE_DEVICES, else the numbers of device files.

    Args:
      devices: the folder of the device files.
    """
    listed = visible_gpus()
    if listed is not None:
        return listed
    with contextlib.suppress(OSError):
        numbers = (re.fullmatch(r"nvidia(\d+)", name) for name in os.listdir(devices))
        return sorted((found[1] for found in numbers if found), key=int)
    return []


def can_use_gpus() -> bool:
    """Returns whether NVIDIA's driver or a GPU's device file is here, or `CUDA_VISIBLE_DEVICES` names a GPU."""
    if usable_gpus():
        return True
    try:
        ctypes.CDLL("libcuda.so.1")
    except OSError:
        return False
    return True


def gpu_of_rank(device: int, local_size: int, script_path: str) -> str | None:
    """Returns the GPU to assign to a rank; None if the rank keeps all GPUs that it sees.

    The rank keeps all GPUs if it is the only rank, if there are fewer GPUs than ranks, or if the script itself chooses
    a GPU by its number on the machine. A single visible GPU is kept, too: a cluster might have chosen it.

    Args:
      device: number of the rank's device.
      local_size: number of ranks on this machine.
      script_path: the script's path.
    """
    gpus = usable_gpus()
    if local_size < 2 or len(gpus) < max(2, local_size) or _is_choosing_gpus(script_path):
        return None
    return gpus[device % len(gpus)]


def describe_gpu_shortage(local_size: int) -> str:
    """Returns a warning if ranks must share several GPUs; "" for at most one GPU, or enough GPUs."""
    gpus = usable_gpus()
    if not 1 < len(gpus) < local_size:
        return ""
    return (
        f"{local_size} ranks of this machine have {len(gpus)} GPUs ({','.join(gpus)}) and share them. Expected a GPU "
        f"for each rank; start {len(gpus)} ranks on this machine, or list more GPUs in {VISIBLE_GPUS}."
    )


def describe_gpus() -> str:
    """Describes the GPUs that ranks of this machine would get, for `npu-run doctor`; "" without GPUs."""
    gpus = usable_gpus()
    if len(gpus) < 2:
        return f"GPU {gpus[0]} for every rank" if gpus else ""
    return f"one each, up to {len(gpus)} ranks: {', '.join(gpus)} ({VISIBLE_GPUS})"


def _is_choosing_gpus(script: str) -> bool:
    """Returns whether a script or a module near it contains "visible_device", which code that chooses GPUs needs."""
    folder = pathlib.Path(os.path.realpath(script)).parent
    modules = itertools.islice(itertools.chain(folder.glob("*.py"), folder.glob("*/*.py")), _MOST_FILES)
    for path in itertools.chain([script], modules):
        with contextlib.suppress(OSError, UnicodeDecodeError):
            if "visible_device" in read_text(path, max_bytes=_MOST_BYTES).lower():
                return True
    return False
