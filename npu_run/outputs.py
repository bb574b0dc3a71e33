"""Checks, before a command starts, that its output folders and files hold no other data."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from npu_bridge.base.files import NotOursError, check_output_path
from npu_bridge.base.held_folders import FolderHeldError
from npu_bridge.base.output_folders import OutputFolder, claim_output_folder
from npu_run.errors import LaunchError

# The files that each command writes to its folders and may remove; a whole folder is one that is handed to a script.
MADE_BY = {
    "npu-run": ("rank_[0-9]*.log", "repeat-[0-9]*/**", "timeline_rank_*.json", "tail.svg", "tail.json", "overlap.svg"),
    "npu-run record": (
        *(f"rank_[0-9]*/{name}" for name in ("record.json", "weights.npz", "weights_after.npz", "step_[0-9]*.npz")),
        "rank_[0-9]*/tensors_[0-9]*.npz",
        "run/**",
        "replay_tf1.py",
    ),
    "npu-run replay": ("run/**",),
    "npu-run bisect": (
        *("repeat-[0-9]*/**", "run-[0-9]*/**", "run-[0-9]*.txt", "run-[0-9]*.json"),
        *("state.json", "operators.json", "kept.txt", "mixlist.json"),
    ),
    "npu-run compare": ("*.[0-9]*.npy", "[0-9]*.npy", "mapping.csv"),
}


@contextlib.contextmanager
def claim_command_output(
    folder: str, option: str, command: str = "npu-run", is_exclusive: bool = True
) -> Iterator[OutputFolder]:
    """Reserves a folder for a command's output while the `with` block runs.

    `command` is a key of `MADE_BY`; the other arguments are as for `claim_output_folder`.

    Raises:
      LaunchError: the folder holds other files, even if the command would clear it; another process uses it; or it
        cannot be written.
    """
    with contextlib.ExitStack() as stack:
        try:
            own = stack.enter_context(claim_output_folder(folder, command, option, MADE_BY[command], is_exclusive))
        except FolderHeldError as error:
            raise LaunchError(f"{option}: {error}") from error
        except NotOursError as error:
            raise LaunchError(str(error)) from error
        except OSError as error:
            raise LaunchError(f"{option} {folder} cannot be written ({error}). Name another folder.") from error
        try:
            yield own
        except NotOursError as error:
            raise LaunchError(str(error)) from error


def check_output_file(path: str | None, option: str, own_pattern: bytes) -> None:
    """Raises LaunchError unless a file can be written without overwriting other data; None means no file.

    Raises:
      LaunchError: a file of another kind has this name, or the folder is missing or read-only.
    """
    if path is None:
        return
    try:
        check_output_path(path, own_pattern, option)
    except OSError as error:
        raise LaunchError(str(error)) from error
