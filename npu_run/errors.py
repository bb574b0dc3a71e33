"""Defines the error of a job that cannot start."""

from __future__ import annotations


class LaunchError(RuntimeError):
    """An error for a job that cannot start as asked; the message is one sentence with the reason and the cure."""
