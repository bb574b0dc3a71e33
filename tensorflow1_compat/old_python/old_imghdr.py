"""Replaces the module `imghdr`, removed in Python 3.13, which recognises image formats by a file's first bytes."""

from __future__ import annotations

import os
from typing import Any

from npu_bridge.base.reading import open_file

__all__ = ["what"]

_BEGINNINGS = {
    "png": (b"\x89PNG\r\n\x1a\n",), "gif": (b"GIF87a", b"GIF89a"), "tiff": (b"MM", b"II"), "rgb": (b"\x01\xda",),
    "rast": (b"\x59\xa6\x6a\x95",), "xbm": (b"#define ",), "bmp": (b"BM",), "exr": (b"\x76\x2f\x31\x01",),
}  # fmt: skip
_PORTABLE = {"pbm": b"14", "pgm": b"25", "ppm": b"36"}


def what(file: Any, h: bytes | None = None) -> str | None:
    """Returns the format of an image file, such as "png"; None for other files.

    Args:
      file: a path, or a file that is open as bytes.
      h: the first bytes of the file, which replace `file`.
    """
    if h is None:
        if isinstance(file, (str, os.PathLike)):
            with open_file(file, "rb") as opened:
                h = opened.read(32)
        else:
            place = file.tell()
            h = file.read(32)
            file.seek(place)
    if h[6:10] in (b"JFIF", b"Exif") or h[:4] == b"\xff\xd8\xff\xdb":
        return "jpeg"
    for kind, numbers in _PORTABLE.items():
        if len(h) > 2 and h[:1] == b"P" and h[1] in numbers and h[2] in b" \t\n\r":
            return kind
    if h[:4] == b"RIFF" and h[8:12] == b"WEBP":
        return "webp"
    return next((kind for kind, begin in _BEGINNINGS.items() if h.startswith(begin)), None)
