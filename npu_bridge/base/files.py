"""Writes files atomically, and removes files; no other module removes or replaces files.

Callers describe how to recognise the files that this package made.
"""

from __future__ import annotations

import contextlib
import os
import re
import secrets
import stat
import tempfile
from collections.abc import Iterator
from typing import Any, Callable

from npu_bridge.base.errors import message

UNFINISHED = ".unfinished-"  # prefix of files that have not got their final names yet
_PROBE_BYTES = 1 << 14
_HEAD_BYTES = 8192  # the first bytes of a file, which show whether this package made it
# Names of files and folders that TensorFlow has not moved to their place yet.
_UNFINISHED = re.compile(r".*(_temp(_\w+)?|\.(tempstate|tmp)\w*)")


class NotOursError(FileExistsError):
    """An error for overwriting or removing a file that this package did not make; the message has the cure."""


@contextlib.contextmanager
def new_file(
    path: str | os.PathLike, mode: str = "w", own_content_pattern: bytes | None = None, permissions: int = 0o666
) -> Iterator[Any]:
    """Opens a new file for writing, which gets its name only when it is complete.

    An existing file of that name is replaced. A link is replaced, too; the file that it leads to stays unchanged.

    Args:
      path: the final name.
      mode: "w" or "wb".
      own_content_pattern: a pattern at the beginning of the files that can be replaced. None replaces any file,
        because the user named it.
      permissions: the file's permissions, before the process's umask applies.
    Raises:
      NotOursError: an existing file of that name does not match `own_content_pattern`.
    """
    if own_content_pattern is not None:
        check_output_path(path, own_content_pattern)
    text = {} if "b" in mode else {"encoding": "utf-8", "newline": ""}
    # A random name, opened only if no file has it.
    unfinished = os.path.join(os.path.dirname(path), f"{UNFINISHED}{secrets.token_hex(8)}")
    descriptor = os.open(unfinished, os.O_WRONLY | os.O_CREAT | os.O_EXCL, permissions)
    try:
        with open(descriptor, mode, **text) as file:
            yield file
        os.replace(unfinished, path)
    except BaseException:
        os.remove(unfinished)
        raise


def write_atomically(path: str | os.PathLike, text: str, own_content_pattern: bytes | None = None) -> None:
    """Writes a text atomically: a crash leaves the old or the complete new file.

    Args:
      path: the final name.
      text: the contents.
      own_content_pattern: as in `new_file`.
    """
    with new_file(path, own_content_pattern=own_content_pattern) as file:
        file.write(text)


def rename_unfinished(unfinished: str, path: str) -> None:
    """Renames a finished file atomically. Its unfinished name begins with `UNFINISHED`, in the same folder.

    Raises:
      NotOursError: the unfinished name does not begin with `UNFINISHED`.
    """
    if not os.path.basename(unfinished).startswith(UNFINISHED):
        raise NotOursError(f"{unfinished} is not an unfinished file.")
    os.replace(unfinished, path)


def check_output_path(path: str | os.PathLike, own_content_pattern: bytes, option: str = "") -> None:
    """Checks that a file can be written without loss: its folder exists, and no foreign file has its name.

    A foreign file that is empty can be replaced.

    Args:
      path: the file to write.
      own_content_pattern: a pattern that matches the beginning of a file made by this package.
      option: the option that named the file, for messages.
    Raises:
      NotOursError: a foreign file has the name.
      OSError: the folder is missing, or read-only.
    """
    refuse_tilde(path, option)
    where, folder = f"{option} {os.fspath(path)}".strip(), os.path.dirname(path) or "."
    if not os.path.isdir(folder):
        raise FileNotFoundError(
            f"{where}: there is no folder {folder!r}. Expected an existing folder; make the folder, or "
            "name another file."
        )
    try:
        found = os.lstat(path)
    except FileNotFoundError:
        found = None
    if found is not None and not stat.S_ISREG(found.st_mode):
        raise NotOursError(
            f"{where} is not an ordinary file. Expected a new file, or one that npu_bridge made; name another file."
        )
    if found is not None and found.st_size:
        with open(path, "rb") as file:
            if not re.search(own_content_pattern, file.read(_HEAD_BYTES)):
                raise NotOursError(
                    f"{where} is a file that npu_bridge did not make. Expected a new file, or one that npu_bridge "
                    f"made; name another file, or move this file away."
                )
    if not os.access(folder, os.W_OK):
        raise PermissionError(f"{where} cannot be written: the folder {folder!r} is read-only. Name another file.")


def make_local_folder(folder: str | os.PathLike) -> None:
    """Creates a folder if it is missing.

    Raises:
      OSError: the folder cannot be created, or is remote: only TensorFlow writes there, and a local folder of that name
        would be a mistake.
    """
    if "://" in os.fspath(folder):
        raise OSError(f"{os.fspath(folder)} is a remote folder, and only checkpoints and event files can be remote")
    os.makedirs(folder, exist_ok=True)


def check_free_space(folder: str | os.PathLike) -> None:
    """Creates a folder and checks its free space by writing some bytes; for writers that do not report failures.

    Raises:
      OSError: the bytes cannot be written.
    """
    os.makedirs(folder, exist_ok=True)
    name = os.path.join(folder, f".room-{secrets.token_hex(8)}")
    descriptor = os.open(name, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    try:
        with open(descriptor, "wb", buffering=0) as file:
            written = 0
            while written < _PROBE_BYTES:  # a disk that is nearly full writes only a part
                written += file.write(bytes(_PROBE_BYTES - written))
    finally:
        os.remove(name)


def temporary_folder(prefix: str = "npu_bridge-") -> tempfile.TemporaryDirectory:
    """Makes a temporary folder on a disk with free space; leaving the context removes the folder.

    Args:
      prefix: the beginning of the folder's name.
    Raises:
      OSError: the disk has no free space; the message names it, and the way to choose another one.
    """
    try:
        folder = tempfile.TemporaryDirectory(prefix=prefix)
        try:
            check_free_space(folder.name)
        except OSError:
            folder.cleanup()
            raise
    except OSError as error:
        place = tempfile.tempdir or "no place"  # Python chose it by writing four bytes, or found none
        got = f"{place} ({error.strerror or error})"
        fix = "Make room in the folder, or name another folder: TMPDIR=/path"
        raise OSError(message("temporary files", "they cannot be written", "a folder with room", got, fix)) from error
    return folder


def refuse_tilde(path: str | os.PathLike, option: str = "") -> None:
    """Raises NotOursError for an unexpanded `~`: a user who deletes such a folder can delete the home folder."""
    if "~" in os.fspath(path).split(os.sep):
        raise NotOursError(
            f"{option} {os.fspath(path)}: the shell did not expand '~'. Expected a path; write $HOME instead of '~'."
        )


def remove_own_files(path: str, is_own_file: Callable[[str, os.stat_result], bool]) -> None:
    """Removes a file, a link, or a folder with all its contents; removes links and never follows them.

    Args:
      path: the path to remove; a missing path is no error.
      is_own_file: gets a file or link and its `lstat`, and returns whether the caller made it. Folders are not checked.
    Raises:
      NotOursError: the path is or contains a foreign file; nothing is removed then.
    """
    files, folders = [], []
    for each, found in walk(path):
        if stat.S_ISDIR(found.st_mode):
            folders.append(each)
        elif is_own_file(each, found):
            files.append(each)
        else:
            raise NotOursError(each)
    for each in files:
        os.unlink(each)
    for each in reversed(folders):  # contents come after their folder in the list
        os.rmdir(each)


def walk(path: str) -> Iterator[tuple[str, os.stat_result]]:
    """Yields a path and all paths below it, each with its `lstat`, folders first; does not follow links."""
    try:
        found = os.lstat(path)
    except FileNotFoundError:
        return
    yield path, found
    if stat.S_ISDIR(found.st_mode):
        for name in sorted(os.listdir(path)):
            yield from walk(os.path.join(path, name))


def remove_file_with_text(path: str, text: str) -> bool:
    """Removes a file if it contains exactly `text`, which only this process wrote; returns whether it was removed."""
    try:
        with open(path, encoding="utf-8") as file:
            is_own = file.read() == text
        if is_own:
            os.unlink(path)
    except (FileNotFoundError, UnicodeDecodeError):
        return False
    return is_own


def remove_unfinished_save(path: str, is_new: bool = False) -> None:
    """Removes the leftovers of an unfinished TensorFlow save, in any file system that TensorFlow supports.

    Args:
      path: a file, or a folder of half-written files, whose name marks it as unfinished.
      is_new: whether a failed save of this process created the path; then any name is accepted.
    Raises:
      NotOursError: the name does not mark the path as unfinished.
    """
    from tensorflow import io

    if not is_new and not _UNFINISHED.fullmatch(os.path.basename(path)):
        raise NotOursError(f"{path} is not left over from an interrupted save.")
    is_link = os.path.islink(path)  # removes the link, not its target
    (io.gfile.rmtree if io.gfile.isdir(path) and not is_link else io.gfile.remove)(path)


def finish_save(unfinished: str, path: str) -> None:
    """Renames a finished file atomically, in any file system that TensorFlow supports.

    Args:
      unfinished: a file whose name, or whose folder's name, marks it as unfinished.
      path: the new name; replaces a file that has it.
    Raises:
      NotOursError: the name does not mark `unfinished` as unfinished.
    """
    from tensorflow import io

    folder, name = os.path.split(unfinished)
    if not any(map(_UNFINISHED.fullmatch, (name, os.path.basename(folder)))):
        raise NotOursError(f"{unfinished} is not an unfinished file.")
    io.gfile.rename(unfinished, path, overwrite=True)


def flush_to_disk(path: str) -> None:
    """Flushes a file to the disk now; does nothing in a remote file system."""
    if "://" in path:
        return
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def write_checkpoint_list(path: str, text: str) -> None:
    """Writes TensorFlow's list of checkpoints atomically, in any file system that TensorFlow supports.

    If a folder has the list's name, the folder is renamed.
    """
    from tensorflow import io

    if io.gfile.isdir(path):
        io.gfile.rename(path, f"{path}.folder_{secrets.token_hex(4)}")
    with io.gfile.GFile(f"{path}.tmp_{secrets.token_hex(8)}", "w") as file:
        file.write(text)
    io.gfile.rename(file.name, path, overwrite=True)
