"""Which GPU a rank of this machine gets, found without starting TensorFlow, which would take memory of all of them."""

from __future__ import annotations

import contextlib
import itertools
import os
import pathlib
import re

from npu_bridge.base.environment import VISIBLE_GPUS, visible_gpus
from npu_bridge.base.reading import read_text

__all__ = ["describe_gpus", "found_gpus", "gpu_of_rank", "shortage"]

_MOST_FILES, _MOST_BYTES = 1000, 1 << 20


def found_gpus(devices: str = "/dev") -> list[str]:
    """The GPUs that a process may use, as CUDA names them: what its variable lists, else those of the device files.

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


def gpu_of_rank(device: int, local_size: int, script: str, devices: str = "/dev") -> str | None:
    """The one GPU for a rank; None where it keeps what it sees.

    That is so for a rank alone; without a GPU, or with one, which a cluster may have chosen for it; with fewer than
    ranks; and for a script that chooses by itself: it counts the GPUs of the machine.

    Args:
      device: number of the rank's device.
      local_size: number of ranks on this machine.
      script: its path.
      devices: as for `found_gpus`.
    """
    gpus = found_gpus(devices)
    if local_size < 2 or len(gpus) < max(2, local_size) or _chooses(script):
        return None
    return gpus[device % len(gpus)]


def shortage(local_size: int, devices: str = "/dev") -> str:
    """A sentence for ranks that have to share GPUs; "" where there are none, one, or enough."""
    gpus = found_gpus(devices)
    if not 1 < len(gpus) < local_size:
        return ""
    return (
        f"{local_size} ranks of this machine have {len(gpus)} GPUs ({','.join(gpus)}) and share them. Expected one for "
        f"each; start {len(gpus)} ranks here, or list more in {VISIBLE_GPUS}."
    )


def describe_gpus(devices: str = "/dev") -> str:
    """What ranks of this machine would get, for the doctor; "" without GPUs."""
    gpus = found_gpus(devices)
    if len(gpus) < 2:
        return f"GPU {gpus[0]} for every rank" if gpus else ""
    return f"one each, up to {len(gpus)} ranks: {', '.join(gpus)} ({VISIBLE_GPUS})"


def _chooses(script: str) -> bool:
    """Whether a script, or a module near it, says which GPUs it wants: all of TensorFlow's ways have this word."""
    folder = pathlib.Path(os.path.realpath(script)).parent
    modules = itertools.islice(itertools.chain(folder.glob("*.py"), folder.glob("*/*.py")), _MOST_FILES)
    for path in itertools.chain([script], modules):
        with contextlib.suppress(OSError, UnicodeDecodeError):
            if "visible_device" in read_text(path, most_bytes=_MOST_BYTES).lower():
                return True
    return False
