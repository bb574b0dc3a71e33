"""Writes files that appear complete or not at all."""

from __future__ import annotations

import contextlib
import os
import secrets
from collections.abc import Iterator
from typing import Any

__all__ = ["new_file", "write_whole"]


@contextlib.contextmanager
def new_file(path: str | os.PathLike, mode: str = "w") -> Iterator[Any]:
    """A file to write, text ("w") or bytes ("wb"), that takes its name when it is complete.

    What had the name before, a link to another file for example, is replaced and not written to.
    """
    text = {} if "b" in mode else {"encoding": "utf-8", "newline": ""}
    # A name that nobody can know, and only if nothing has it.
    unfinished = os.path.join(os.path.dirname(path), f".unfinished-{secrets.token_hex(8)}")
    descriptor = os.open(unfinished, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666)
    try:
        with open(descriptor, mode, **text) as file:
            yield file
        os.replace(unfinished, path)
    except BaseException:
        os.remove(unfinished)
        raise


def write_whole(path: str | os.PathLike, text: str) -> None:
    """Writes a text in one move: a crash leaves what was there, or all of the new one."""
    with new_file(path) as file:
        file.write(text)
