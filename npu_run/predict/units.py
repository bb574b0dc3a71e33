"""Parses numbers with units from a command line: 110M, 1Gbit, 50us, 1..4096."""

from __future__ import annotations

import math
import re

from npu_run.errors import LaunchError

_NUMBER = r"\s*(\d+(?:\.\d*)?(?:[eE][+-]?\d+)?|\.\d+)\s*"
_COUNT = re.compile(_NUMBER + r"([kKMGBT]?)\s*")
_RATE = re.compile(_NUMBER + r"([kKMGT]?)(bit|bits|bps|B|Bps)(?:/s)?\s*")
_SECS = re.compile(_NUMBER + r"(ns|us|\u00b5s|ms|s|)\s*")
_RANGE = re.compile(r"\s*(\d{1,18})\s*\.\.\s*(\d{1,18})\s*")
_FACTORS = {"": 1.0, "k": 1e3, "K": 1e3, "M": 1e6, "G": 1e9, "B": 1e9, "T": 1e12}
_SECS_OF = {"ns": 1e-9, "us": 1e-6, "\u00b5s": 1e-6, "ms": 1e-3, "s": 1.0, "": 1.0}
_MOST_RANKS = 1_000_000


def parse_count(text: str, option: str, maximum: float = 1e15) -> int:
    """Parses a whole number such as 110M or 1.3B; errors name the option."""
    found = _COUNT.fullmatch(text)
    count = float(found[1]) * _FACTORS[found[2]] if found else 0.0
    if not 1 <= count <= maximum:
        raise _option_error(option, f"a number from 1 to {maximum:.0e}, such as 25600000, 110M or 1.3B", text)
    return round(count)


def parse_bytes_per_sec(text: str, name: str) -> float:
    """Parses a rate, in bits (1Gbit, 300Mbit/s) or bytes (125MB/s), to bytes per second; errors name the option."""
    found = _RATE.fullmatch(text)
    rate = float(found[1]) * _FACTORS[found[2]] if found else 0.0
    if not 0 < rate < math.inf:
        raise _option_error(name, "bits or bytes per second, such as 1Gbit, 300Mbit/s or 125MB/s", text)
    return rate if found[3].startswith("B") else rate / 8.0


def parse_secs(text: str, name: str) -> float:
    """Parses a time such as 50us, 0.2ms, 1.5s or 0.2 to seconds; errors name the option."""
    found = _SECS.fullmatch(text)
    if not found or math.isinf(float(found[1])):
        raise _option_error(name, "a time such as 50us, 0.2ms or 1.5s", text)
    return float(found[1]) * _SECS_OF[found[2]]


def parse_ranks(text: str, name: str) -> list[int]:
    """Parses numbers of ranks and returns them sorted.

    `1,2,6` is a list; `1..4096` stands for both ends and all powers of two between them.
    """
    numbers: set[int] = set()
    for part in text.split(","):
        found = _RANGE.fullmatch(part)
        if found:
            first, last = int(found[1]), int(found[2])
            numbers |= {first, last, *(2**power for power in range(21) if first < 2**power < last)}
            is_understood = first <= last
        else:
            is_understood = part.strip().isdecimal() and len(part) < 20
            numbers |= {int(part)} if is_understood else set()
        if not is_understood or min(numbers) < 1 or max(numbers) > _MOST_RANKS:
            raise _option_error(name, f"numbers of ranks from 1 to {_MOST_RANKS}, such as 1,2,6 or 1..4096", text)
    return sorted(numbers)


def _option_error(name: str, expected: str, text: str) -> LaunchError:
    return LaunchError(f"{name} is not understood. Expected {expected}; got {text[:60]!r}.")
