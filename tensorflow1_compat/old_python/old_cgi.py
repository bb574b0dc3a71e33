"""Replaces the text functions of the module `cgi`, which Python 3.13 removed, but no functions for web servers."""

from __future__ import annotations

import html
from urllib.parse import parse_qs, parse_qsl

__all__ = ["escape", "parse_header", "parse_qs", "parse_qsl"]


def escape(s: str, quote: bool | None = None) -> str:
    """Escapes `&`, `<` and `>` in a text for HTML; with `quote` also `"`."""
    text = html.escape(s, quote=False)
    return text.replace('"', "&quot;") if quote else text


def parse_header(line: str) -> tuple[str, dict[str, str]]:
    """Parses a header such as `text/html; charset="utf-8"` into its value and parameters."""
    key, *parts = _split_at_semicolons(line)
    found = {}
    for part in parts:
        name, equals, value = part.partition("=")
        if not equals:
            continue
        value = value.strip()
        if len(value) >= 2 and value[0] == value[-1] == '"':
            value = value[1:-1].replace("\\\\", "\\").replace('\\"', '"')
        found[name.strip().lower()] = value
    return key, found


def _split_at_semicolons(line: str) -> list[str]:
    """Splits a text at semicolons outside of quotes."""
    parts, is_quoted, before = [""], False, ""
    for letter in line:
        if letter == '"' and before != "\\":
            is_quoted = not is_quoted
        if letter == ";" and not is_quoted:
            parts.append("")
        else:
            parts[-1] += letter
        before = letter
    return [part.strip() for part in parts]
