"""`MissingExtraError`: an optional package is not installed."""

from __future__ import annotations

import importlib
from typing import Any


class MissingExtraError(ImportError):
    """An optional package is not installed; the message names the extra that installs it."""


def imported(module: str, who: str, extra: str) -> Any:
    """Imports a module of an optional package, or raises a `MissingExtraError` that names the user, `who`."""
    try:
        return importlib.import_module(module)
    except ImportError as error:
        package = module.partition(".")[0]
        raise MissingExtraError(
            f"{who}: {package} is not installed. Install it with: pip install 'npu-bridge[{extra}]'"
        ) from error
