"""Defines `MissingExtraError`, and imports optional packages."""

from __future__ import annotations

import importlib
from typing import Any


class MissingExtraError(ImportError):
    """Raised when an optional package is not installed; the message names the extra that installs the package."""


def import_optional(module: str, who: str, extra: str) -> Any:
    """Imports a module of an optional package; raises `MissingExtraError`, which names `who`, if it is missing."""
    try:
        return importlib.import_module(module)
    except ImportError as error:
        package = module.partition(".")[0]
        raise MissingExtraError(
            f"{who}: {package} is not installed. Install it with: pip install 'npu-bridge[{extra}]'"
        ) from error
