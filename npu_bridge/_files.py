"""Writes files that appear complete or not at all."""

from __future__ import annotations

import os

__all__ = ["write_whole"]


def write_whole(path: str, text: str) -> None:
    """Writes a text in one move: a crash leaves what was there, or all of the new one."""
    with open(f"{path}.tmp", "w", encoding="utf-8") as file:
        file.write(text)
    os.replace(f"{path}.tmp", path)
