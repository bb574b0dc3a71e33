"""Defines `MissingExtraError`, and imports optional packages."""

from __future__ import annotations

import importlib
from typing import Any


class MissingExtraError(ImportError):
    """Raised when an optional package cannot be imported; the message names the extra that installs the package."""


def import_optional(module: str, caller: str, extra: str) -> Any:
    """Imports a module of an optional package; if that fails, raises a `MissingExtraError` that names `caller`."""
    try:
        return importlib.import_module(module)
    except ImportError as error:
        package = module.partition(".")[0]
        is_missing = isinstance(error, ModuleNotFoundError) and (error.name or "").partition(".")[0] == package
        problem = "is not installed" if is_missing else f"cannot be imported ({error})"
        again = "" if is_missing else "again "
        option = "" if is_missing else "--force-reinstall "
        raise MissingExtraError(
            f"{caller}: {package} {problem}. Install it {again}with: pip install {option}'npu-bridge[{extra}]'"
        ) from error
