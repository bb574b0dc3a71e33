"""Writes files that appear complete or not at all; the one module that removes or replaces files.

Everybody else asks here, and says how a file of this package is told from somebody else's.
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

__all__ = [
    "UNFINISHED",
    "NotOursError",
    "check_home",
    "check_output",
    "check_room",
    "finish",
    "flush",
    "new_file",
    "put_in_place",
    "remove_own",
    "remove_text",
    "remove_unfinished",
    "replace_list",
    "temporary_folder",
    "walk",
    "write_whole",
]

UNFINISHED = ".unfinished-"  # how names begin of files that have not got theirs yet
_PROBE_BYTES = 1 << 14
_HEAD_BYTES = 8192  # what tells a file of ours stands within its first bytes
# What TensorFlow calls files and folders that it has not moved to their place yet.
_UNFINISHED = re.compile(r".*(_temp(_\w+)?|\.(tempstate|tmp)\w*)")


class NotOursError(FileExistsError):
    """What would be overwritten or removed was not made by this package; the message says what to do."""


@contextlib.contextmanager
def new_file(
    path: str | os.PathLike, mode: str = "w", ours: bytes | None = None, permissions: int = 0o666
) -> Iterator[Any]:
    """A file to write, text ("w") or bytes ("wb"), that takes its name when it is complete.

    What had the name before, a link to another file for example, is replaced and not written to.

    Args:
      path: its name.
      mode: "w" or "wb".
      ours: a pattern in the beginning of the files that may be replaced; None for any, because the user has named it.
      permissions: of the file, less what the process's umask takes.
    Raises:
      NotOursError: there is another file of that name.
    """
    if ours is not None:
        check_output(path, ours)
    text = {} if "b" in mode else {"encoding": "utf-8", "newline": ""}
    # A name that nobody can know, and only if nothing has it.
    unfinished = os.path.join(os.path.dirname(path), f"{UNFINISHED}{secrets.token_hex(8)}")
    descriptor = os.open(unfinished, os.O_WRONLY | os.O_CREAT | os.O_EXCL, permissions)
    try:
        with open(descriptor, mode, **text) as file:
            yield file
        os.replace(unfinished, path)
    except BaseException:
        os.remove(unfinished)
        raise


def write_whole(path: str | os.PathLike, text: str, ours: bytes | None = None) -> None:
    """Writes a text in one move: a crash leaves what was there, or all of the new one. `ours` as in `new_file`."""
    with new_file(path, ours=ours) as file:
        file.write(text)


def put_in_place(unfinished: str, path: str) -> None:
    """Gives a file its name in one move, when its writer has finished it under a name with `UNFINISHED` beside it.

    Raises:
      NotOursError: its name is another one.
    """
    if not os.path.basename(unfinished).startswith(UNFINISHED):
        raise NotOursError(f"{unfinished} is not an unfinished file.")
    os.replace(unfinished, path)


def check_output(path: str | os.PathLike, ours: bytes, option: str = "") -> None:
    """Sees that a file can be written without loss: its folder is there, and nothing of somebody else's has its name.

    An empty file may be replaced.

    Args:
      path: the file to write.
      ours: a pattern in the beginning of files that this package made.
      option: what named the file, for messages.
    Raises:
      NotOursError: something else has the name.
      OSError: the folder is not there, or cannot be written to.
    """
    check_home(path, option)
    where, folder = f"{option} {os.fspath(path)}".strip(), os.path.dirname(path) or "."
    if not os.path.isdir(folder):
        raise FileNotFoundError(f"{where}: there is no folder {folder!r}. Expected one; make it, or name another file.")
    try:
        found = os.lstat(path)
    except FileNotFoundError:
        found = None
    if found is not None and not stat.S_ISREG(found.st_mode):
        raise NotOursError(
            f"{where} is not an ordinary file. Expected a new file, or one made before; name another file."
        )
    if found is not None and found.st_size:
        with open(path, "rb") as file:
            if not re.search(ours, file.read(_HEAD_BYTES)):
                raise NotOursError(
                    f"{where} is a file that npu_bridge did not make. Expected a new file, or one made before; name "
                    f"another file, or move that one away."
                )
    if not os.access(folder, os.W_OK):
        raise PermissionError(f"{where} cannot be written: the folder {folder!r} is read-only. Name another file.")


def check_room(folder: str | os.PathLike) -> None:
    """Tries whether a folder, which is made, takes some bytes, for writers that do not say when they fail.

    Raises:
      OSError: it does not.
    """
    os.makedirs(folder, exist_ok=True)
    name = os.path.join(folder, f".room-{secrets.token_hex(8)}")
    descriptor = os.open(name, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    try:
        with open(descriptor, "wb", buffering=0) as file:
            written = 0
            while written < _PROBE_BYTES:  # a disk that is nearly full takes a part
                written += file.write(bytes(_PROBE_BYTES - written))
    finally:
        os.remove(name)


def temporary_folder(prefix: str = "npu_bridge-") -> tempfile.TemporaryDirectory:
    """A folder that is gone when it is closed, on a disk that has room.

    Args:
      prefix: how its name begins.
    Raises:
      OSError: there is no place for it; the message names the place, and says how to choose another one.
    """
    try:
        folder = tempfile.TemporaryDirectory(prefix=prefix)
        try:
            check_room(folder.name)
        except OSError:
            folder.cleanup()
            raise
    except OSError as error:
        place = tempfile.tempdir or "no place"  # which Python has chosen, where it has found one that takes four bytes
        got = f"{place} ({error.strerror or error})"
        fix = "Make room there, or name a folder with room: TMPDIR=/path"
        raise OSError(message("temporary files", "they cannot be written", "a folder with room", got, fix)) from error
    return folder


def check_home(path: str | os.PathLike, option: str = "") -> None:
    """Raises NotOursError for a `~` that no shell has read: who deletes such a folder may delete the home folder."""
    if "~" in os.fspath(path).split(os.sep):
        raise NotOursError(
            f"{option} {os.fspath(path)}: the shell has left '~' as it is. Expected a path; write $HOME instead of '~'."
        )


def remove_own(path: str, is_own: Callable[[str, os.stat_result], bool]) -> None:
    """Removes a file, a link, or a folder with all that is in it; links are removed and never followed.

    Args:
      path: what to remove; if it is not there, nothing happens.
      is_own: whether a file or link, with its `lstat`, was made by the caller; folders belong to what is in them.
    Raises:
      NotOursError: there is something else in it; then nothing is removed.
    """
    files, folders = [], []
    for each, found in walk(path):
        if stat.S_ISDIR(found.st_mode):
            folders.append(each)
        elif is_own(each, found):
            files.append(each)
        else:
            raise NotOursError(each)
    for each in files:
        os.unlink(each)
    for each in reversed(folders):  # what is inside comes behind
        os.rmdir(each)


def walk(path: str) -> Iterator[tuple[str, os.stat_result]]:
    """A path and all below it with their `lstat`, folders before what is in them; links are not followed."""
    try:
        found = os.lstat(path)
    except FileNotFoundError:
        return
    yield path, found
    if stat.S_ISDIR(found.st_mode):
        for name in sorted(os.listdir(path)):
            yield from walk(os.path.join(path, name))


def remove_text(path: str, text: str) -> bool:
    """Removes a file if it is ours by holding this very text; tells whether it did."""
    try:
        with open(path, encoding="utf-8") as file:
            is_own = file.read() == text
        if is_own:
            os.unlink(path)
    except (FileNotFoundError, UnicodeDecodeError):
        return False
    return is_own


def remove_unfinished(path: str, is_new: bool = False) -> None:
    """Removes what a save of TensorFlow has not finished, in any file system that TensorFlow knows.

    Args:
      path: a file, or a folder of half-written files, whose name says that it is unfinished.
      is_new: it came into being in a save of this process that has failed, whatever its name is.
    Raises:
      NotOursError: its name is another one.
    """
    from tensorflow import io

    if not is_new and not _UNFINISHED.fullmatch(os.path.basename(path)):
        raise NotOursError(f"{path} is not what an unfinished save leaves.")
    is_link = os.path.islink(path)  # a link is removed, and not what it leads to
    (io.gfile.rmtree if io.gfile.isdir(path) and not is_link else io.gfile.remove)(path)


def finish(unfinished: str, path: str) -> None:
    """Gives a file its name in one move, in any file system that TensorFlow knows.

    Args:
      unfinished: a file whose name, or that of its folder, says that it is unfinished.
      path: its name; a file that has it is replaced.
    Raises:
      NotOursError: the name of `unfinished` is another one.
    """
    from tensorflow import io

    folder, name = os.path.split(unfinished)
    if not any(map(_UNFINISHED.fullmatch, (name, os.path.basename(folder)))):
        raise NotOursError(f"{unfinished} is not an unfinished file.")
    io.gfile.rename(unfinished, path, overwrite=True)


def flush(path: str) -> None:
    """Has the kernel write a file to the disk now; nothing is done for one of a remote file system."""
    if "://" in path:
        return
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def replace_list(path: str, text: str) -> None:
    """Writes TensorFlow's list of checkpoints in one move, in any file system that TensorFlow knows.

    A folder that has its name is kept under another one.
    """
    from tensorflow import io

    if io.gfile.isdir(path):
        io.gfile.rename(path, f"{path}.folder_{secrets.token_hex(4)}")
    with io.gfile.GFile(f"{path}.tmp_{secrets.token_hex(8)}", "w") as file:
        file.write(text)
    io.gfile.rename(file.name, path, overwrite=True)
