"""Opens files for reading: only regular files, and only inside the folder in which their name was found."""

from __future__ import annotations

import contextlib
import json
import math
import os
import re
import stat
from collections.abc import Iterator
from typing import Any

from npu_bridge.base.errors import did_you_mean, message, shortened
from npu_bridge.base.terminal import escape_in_line

_KINDS = {
    stat.S_IFDIR: "a folder",
    stat.S_IFLNK: "a symbolic link",
    stat.S_IFIFO: "a pipe (FIFO)",
    stat.S_IFSOCK: "a socket",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
}
_LONGEST_LINE = 80


class RefusedFileError(OSError):
    """An error for a path that is not a regular file, or is outside of the folder it must be in."""


@contextlib.contextmanager
def open_file(
    path: str | os.PathLike, mode: str = "r", within_folder: str | os.PathLike | None = None, **text_options: Any
) -> Iterator:
    """Opens a regular file; pipes and devices, which could block the caller, are refused.

    Args:
      path: the file. With `within_folder`, a path below that folder, with or without the folder in front.
      mode: "r" or "rb".
      within_folder: the folder that must contain the file, for a path that was read from a file or a listing. Links
        below this folder, and paths that lead out of the folder, are refused. None for a path from the user, even a
        link.
      **text_options: passed to `open`: `encoding` (by default UTF-8, also with a byte-order mark), `errors`, `newline`.
    Raises:
      RefusedFileError: the file is not regular, or outside of the folder.
      OSError: the file cannot be opened.
    """
    name = os.fspath(path)
    file = _open_regular(name) if within_folder is None else _open_below(name, os.fspath(within_folder))
    if "b" not in mode:
        text_options.setdefault("encoding", "utf-8-sig")
    with os.fdopen(file, mode, **text_options) as opened:
        yield opened


def unreadable_file_error(error: OSError, owner: str, path: str | os.PathLike, what: str) -> OSError:
    """Returns the error with a new text: the file, its expected content, and a similar name in the folder."""
    path = os.path.abspath(path)
    folder, name = os.path.split(path)
    is_missing = isinstance(error, FileNotFoundError)
    fix = "Correct the path."
    with contextlib.suppress(OSError):
        fix = did_you_mean(name, os.listdir(folder) if is_missing else (), fix)
    problem = "there is no such file" if is_missing else "the file cannot be read"
    got = path if is_missing or not error.strerror else f"{path}: {error.strerror}"
    named = type(error)(message(owner, problem, what, got if error.errno or is_missing else str(error), fix))
    named.errno = error.errno
    return named


def wrong_format_error(form: str, error: ValueError, owner: str, path: str, text: str) -> ValueError:
    """Returns the error for a file that is not in format `form`, with the faulty line and the parser's reason."""
    lines = text.rstrip().splitlines() or [""]
    found = re.search(r"\bline (\d+)", str(error))
    number = min(int(found[1]), len(lines)) if found else len(lines)
    reason = re.sub(r"(:| \(at) (line \d+|end of).*", "", str(error))
    got = f"{shortened(lines[number - 1], _LONGEST_LINE)!r} ({reason})"
    where, expected = f"{path}:{number}: {owner}", f"a line of {form}"
    return ValueError(message(where, f"it is not {form}", expected, got, "Correct the line."))


def read_text(path: str | os.PathLike, within_folder: str | os.PathLike | None = None, max_bytes: int = 1 << 31) -> str:
    """Reads a text file in UTF-8.

    Raises:
      OSError: as for `open_file`; also if the file has more than `max_bytes`.
      UnicodeDecodeError: the file is not UTF-8 text.
    """
    with open_file(path, "rb", within_folder) as file:
        content = file.read(max_bytes + 1)
    if len(content) > max_bytes:
        raise RefusedFileError(f"{escape_in_line(str(path))} has more than {max_bytes} bytes")
    return content.decode("utf-8-sig")


def read_json(path: str | os.PathLike, within_folder: str | os.PathLike | None = None) -> Any:
    """Reads a JSON file.

    Raises:
      OSError: as for `open_file`.
      ValueError: as for `parse_json`; a UnicodeDecodeError if the file is not UTF-8 text.
    """
    return parse_json(read_text(path, within_folder))


def parse_json(text: str) -> Any:
    """Parses JSON text whose numbers fit into 64 bits.

    Raises:
      ValueError: the text is not JSON, is nested too deeply, or has a number of more than 64 bits.
    """
    try:
        return json.loads(text, parse_int=_parse_integer, parse_float=_parse_float)
    except RecursionError:
        raise ValueError("the JSON is nested too deeply") from None


def to_integer(value: Any, minimum: int = 0, maximum: int = 2**53) -> int:
    """Returns a number or text from a file as a whole number within bounds.

    Raises:
      TypeError, ValueError: `value` is not a whole number, or out of bounds.
    """
    if isinstance(value, float) and not math.isfinite(value):
        raise ValueError(f"expected a whole number; got {value}")
    number = int(value)
    if not minimum <= number <= maximum:
        raise ValueError(f"expected a number from {minimum} to {maximum}; got {str(number)[:40]}")
    return number


def _parse_integer(digits: str) -> int:
    if len(digits) > 20 or not -(2**63) <= int(digits) < 2**64:
        raise ValueError(f"the number {digits[:30]} has more than 64 bits")
    return int(digits)


def _parse_float(digits: str) -> float:
    number = float(digits)
    if math.isinf(number):
        raise ValueError(f"the number {digits[:30]} is larger than any 64-bit number")
    return number


def _path_below(folder: str, path: str) -> str:
    """Returns a path below a folder, relative to it and normalised; `path` can have the folder in front.

    Raises:
      RefusedFileError: the path leaves the folder: it is absolute, or contains `..`.
    """
    inside = path[len(folder) :].lstrip(os.sep) if path.startswith(folder.rstrip(os.sep) + os.sep) else path
    parts = [part for part in inside.split(os.sep) if part not in ("", ".")]
    _check_file_name(inside)
    if os.path.isabs(inside) or ".." in parts or not parts:
        raise RefusedFileError(
            f"{escape_in_line(inside)!r} leads out of {escape_in_line(folder)}, where it was found, and is not read; "
            f"expected a file in that folder"
        )
    return os.sep.join(parts)


def _open_regular(path: str) -> int:
    _check_file_name(path)
    _check_file_kind(os.stat(path), path)
    return _check_descriptor(os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC), path)


def _open_below(path: str, folder: str) -> int:
    """Opens a file below a folder, folder by folder, so that no folder can be replaced by a link meanwhile."""
    *folders, name = _path_below(folder, path).split(os.sep)
    place = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    shown = folder
    try:
        for part in folders:
            shown = os.path.join(shown, part)
            _check_file_kind(os.stat(part, dir_fd=place, follow_symlinks=False), shown, stat.S_IFDIR)
            below = os.open(part, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=place)
            os.close(place)
            place = below
        shown = os.path.join(shown, name)
        try:
            _check_file_kind(os.stat(name, dir_fd=place, follow_symlinks=False), shown)
            return _check_descriptor(
                os.open(name, os.O_RDONLY | os.O_NONBLOCK | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=place), shown
            )
        except FileNotFoundError as error:
            raise FileNotFoundError(error.errno, error.strerror, shown) from None
    finally:
        os.close(place)


def _check_file_name(path: str) -> None:
    try:
        is_name = b"\0" not in os.fsencode(path)
    except UnicodeEncodeError:
        is_name = False
    if not is_name:
        raise RefusedFileError(f"{escape_in_line(path[:200])} cannot be the name of a file")


def _check_descriptor(file: int, path: str) -> int:
    try:
        _check_file_kind(os.fstat(file), path)
        os.set_blocking(file, True)
    except BaseException:
        os.close(file)
        raise
    return file


def _check_file_kind(status: os.stat_result, path: str, kind: int = stat.S_IFREG) -> None:
    """Checks a file's kind; called before a file is opened, as opening acts on some devices, and again afterwards."""
    if stat.S_IFMT(status.st_mode) != kind:
        expected = "a regular file" if kind == stat.S_IFREG else "a folder"
        got = _KINDS.get(stat.S_IFMT(status.st_mode), "another kind of file")
        raise RefusedFileError(
            f"{escape_in_line(path)} is {got}, which is not followed or read here; expected {expected}"
        )
