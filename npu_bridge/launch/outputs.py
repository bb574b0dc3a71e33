"""Checks, before a command does anything, that the folders and files it will write to are its own."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from npu_bridge.base.files import NotOursError, check_output
from npu_bridge.base.own_folders import FolderHeldError, OwnFolder, own_folder
from npu_bridge.launch.errors import LaunchError

__all__ = ["check_file", "own_output"]


@contextlib.contextmanager
def own_output(folder: str, option: str, command: str = "npu-run", holds: bool = True) -> Iterator[OwnFolder]:
    """A folder for what a command writes, held while this block lasts; arguments as of `own_folder`.

    Raises:
      LaunchError: something else is in it, also when the command is about to clear it; somebody uses it; or it cannot
        be written.
    """
    with contextlib.ExitStack() as stack:
        try:
            own = stack.enter_context(own_folder(folder, command, option, holds))
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


def check_file(path: str | None, option: str, ours: bytes) -> None:
    """Sees that a file can be written without loss; None is no file.

    Raises:
      LaunchError: something else has its name, or its folder is not there or cannot be written to.
    """
    if path is None:
        return
    try:
        check_output(path, ours, option)
    except OSError as error:
        raise LaunchError(str(error)) from error
