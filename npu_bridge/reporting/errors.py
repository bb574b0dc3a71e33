"""`MissingExtraError`: an optional package is not installed."""

from __future__ import annotations


class MissingExtraError(ImportError):
    """An optional package is not installed; the message names the extra that brings it."""
