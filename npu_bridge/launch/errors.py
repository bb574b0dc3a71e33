"""The error of a job that cannot be started."""

from __future__ import annotations

__all__ = ["LaunchError"]


class LaunchError(RuntimeError):
    """The job cannot start as asked; the message says in one sentence why and what to do."""
