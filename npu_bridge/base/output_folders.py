"""Holds folders that commands write to: new ones, empty ones, or those with a marker file of the same command.

The marker lists the files that the command has left. The next run removes only these files; files with other names are
never deleted, even if they appeared while the command ran. The folder itself stays. A copy of the folder does not count
as made by the command.
"""

from __future__ import annotations

import contextlib
import fnmatch
import json
import os
import stat
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from npu_bridge.base import held_folders
from npu_bridge.base.files import UNFINISHED, NotOursError, new_file, refuse_tilde, remove_own_files, walk
from npu_bridge.base.held_folders import FolderHold, hold_folder
from npu_bridge.base.terminal import path_for_message

MARKER = ".npu_bridge.json"
_PURPOSE = "npu_bridge"
_IGNORED = (MARKER, f".{_PURPOSE}.lock")
_NEVER = 2**63  # nanoseconds
_OURS = rb'^\{"made_by": '


class OutputFolder:
    """A folder that a command can write to.

    Attributes:
      path: the folder's real path.
    """

    def __init__(
        self, path: str, command: str, option: str, file_patterns: Sequence[str], last_sign: float | None = None
    ):
        self.path, self._command, self._option, self._file_patterns = path, command, option, file_patterns
        self._marker = os.path.join(path, MARKER)
        self._facts = _read_marker(self._marker)
        if self._facts.get("is_open") and last_sign is not None:
            # The command was killed: files from well after its last sign of life belong to someone else.
            self._list_files(until_ns=int((last_sign + held_folders.BEAT_SECS) * 1e9))
        if not self._facts.get("is_open"):  # else it is open in this process, or its closing time is unknown
            self._facts = {"made_by": command, "files": self._facts.get("files", {}), "is_open": True}
            self._facts.update(inode=os.stat(path).st_ino, since_ns=_NEVER)
            self._write()
            # By the file system's clock: files that change from now on are the command's.
            self._facts["since_ns"] = os.stat(self._marker).st_ctime_ns
            self._write()

    def clear(self, *patterns: str) -> None:
        """Removes files and folders that this command made earlier and whose names match a pattern with `*`.

        Raises:
          NotOursError: a foreign file matches a pattern, and nothing is removed; or a file cannot be removed.
        """
        names = self.check(*patterns)
        try:
            for name in names:
                remove_own_files(os.path.join(self.path, name), self._is_own)
        except NotOursError:
            raise
        except OSError as error:
            problem = f"{self._option}: {path_for_message(self.path)} cannot be cleared ({error}). Name another folder."
            raise NotOursError(problem) from error

    def check(self, *patterns: str) -> list[str]:
        """Returns the names that match a pattern; raises NotOursError if another program made one of the files."""
        names = [name for name in sorted(os.listdir(self.path)) if name not in _IGNORED]
        chosen = [name for name in names if any(fnmatch.fnmatchcase(name, pattern) for pattern in patterns)]
        for path, found in (each for name in chosen for each in walk(os.path.join(self.path, name))):
            if not stat.S_ISDIR(found.st_mode) and not self._is_own(path, found):
                raise _foreign_file_error(self._option, self._command, self.path, os.path.relpath(path, self.path))
        return chosen

    def close(self) -> None:
        """Writes the list of the command's files to the marker."""
        with contextlib.suppress(OSError):  # a full disk, or a file that is just being removed: it stays open
            self._list_files()
            self._write()

    def _list_files(self, until_ns: int = _NEVER) -> None:
        files = {}
        for name in os.listdir(self.path):
            for path, found in walk(os.path.join(self.path, name)):
                is_left_out = stat.S_ISDIR(found.st_mode) or name in _IGNORED or found.st_ctime_ns > until_ns
                if not is_left_out and self._is_own(path, found):
                    files[os.path.relpath(path, self.path)] = [found.st_size, found.st_mtime_ns]
        self._facts = {**self._facts, "files": files, "is_open": False}

    def _is_own(self, path: str, status: os.stat_result) -> bool:
        """Returns whether the command made a file: its name matches, and it is new, or its size and time are known."""
        name = os.path.relpath(path, self.path)
        if not any(_matches_pattern(name, pattern) for pattern in self._file_patterns):
            return False
        if status.st_ctime_ns >= self._facts["since_ns"]:
            return True
        return self._facts["files"].get(name) == [status.st_size, status.st_mtime_ns]

    def _write(self) -> None:
        with new_file(self._marker, own_content_pattern=_OURS) as file:
            json.dump(self._facts, file)


@contextlib.contextmanager
def claim_output_folder(
    folder: str, command: str, option: str, file_patterns: Sequence[str], is_exclusive: bool = True
) -> Iterator[OutputFolder]:
    """Holds a folder to write to during this block; creates it if needed, and excludes other processes.

    Args:
      folder: the path.
      command: the command that writes, as it is typed: "npu-run record".
      option: the option that named the folder, for messages.
      file_patterns: patterns of all names that the command ever writes below the folder. `*` matches within one name,
        `/**` at the end matches everything in a folder. Files with other names belong to someone else, whatever their
        age.
      is_exclusive: whether to exclude other processes; False if several processes of one job write to the folder.
    Raises:
      NotOursError: the path is a file, or the folder has files that the command did not make.
      FolderHeldError: another process writes to the folder now.
      OSError: the folder cannot be written.
    """
    path = os.path.realpath(folder)
    _check_folder_is_usable(path, command, option)
    os.makedirs(path, exist_ok=True)
    with hold_folder(path, _PURPOSE, command) if is_exclusive else FolderHold(None) as hold:
        _check_folder_is_usable(path, command, option)  # again: files can have come before the folder was held
        own = OutputFolder(path, command, option, file_patterns, hold.last_sign)
        try:
            yield own
        finally:
            own.close()


def _check_folder_is_usable(path: str, command: str, option: str) -> None:
    """Raises NotOursError unless a folder is new, empty, or made by the command."""
    refuse_tilde(path, option)
    if not os.path.lexists(path):
        return
    where = f"{option}: {path_for_message(path)}"
    if not os.path.isdir(path):
        raise NotOursError(f"{where} is not a folder. Expected a new or empty folder; name another with {option}.")
    shared_folders = ["/", os.path.expanduser("~")]
    with contextlib.suppress(FileNotFoundError):  # raised if no folder for temporary files is writable
        shared_folders.append(tempfile.gettempdir())
    if path in map(os.path.realpath, shared_folders):
        raise NotOursError(
            f"{where} is shared by all programs. Expected a folder for this command alone; name a new folder inside it."
        )
    names = sorted(name for name in os.listdir(path) if not _is_ignored(name))
    marker = os.path.join(path, MARKER)
    if not os.path.lexists(marker):
        if names:
            raise _foreign_file_error(option, command, path, names[0])
        return
    facts = _read_marker(marker)
    if facts.get("made_by") != command or facts.get("inode") != os.stat(path).st_ino:
        made_by = facts.get("made_by") or "something else"
        origin = f"was made by {made_by}" if made_by != command else "is a copy of a folder that the command made"
        raise NotOursError(
            f"{where} {origin}. Expected a new folder, an empty one, or one that {command} made; name another "
            f"with {option}."
        )


def _matches_pattern(name: str, pattern: str) -> bool:
    """Returns whether a path below the folder matches a pattern; of an unfinished file, only its folder must match."""
    parts, wanted = name.split(os.sep), pattern.split("/")
    if wanted[-1] == "**":
        wanted = wanted[:-1]
        if len(parts) <= len(wanted):
            return False
        parts = parts[: len(wanted)]
    elif parts[-1].startswith(UNFINISHED):
        parts, wanted = parts[:-1], wanted[:-1]
    return len(parts) == len(wanted) and all(map(fnmatch.fnmatchcase, parts, wanted))


def _is_ignored(name: str) -> bool:
    return name == MARKER or name.startswith((f".{_PURPOSE}.lock", UNFINISHED))


def _foreign_file_error(option: str, command: str, path: str, example: str) -> NotOursError:
    where = f"{option}: {path_for_message(path)}"
    return NotOursError(
        f"{where} holds {example!r}, which {command} did not make. Expected a new folder, an empty one, or "
        f"one that {command} made; name another with {option}."
    )


def _read_marker(path: str) -> dict[str, Any]:
    try:
        if not stat.S_ISREG(os.lstat(path).st_mode):
            return {}
        facts = json.loads(Path(path).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    kinds = {"made_by": str, "files": dict, "is_open": bool, "inode": int, "since_ns": int}
    is_whole = isinstance(facts, dict) and all(isinstance(facts.get(key), kind) for key, kind in kinds.items())
    return facts if is_whole else {}
