"""Standing around every session run of a rank before the script, or even TensorFlow, is there.

A script may set variables before it imports TensorFlow, so a rank must not import it first. The class of all sessions
is changed at the moment its module has been loaded, whoever loads it.
"""

from __future__ import annotations

import functools
import importlib.abc
import importlib.machinery
import importlib.util
import sys
import types
from typing import Any, Callable

from npu_bridge.launch.timeline import Recording

__all__ = ["record_sessions"]

_MODULE = "tensorflow.python.client.session"


def record_sessions(recording: Recording, rank: int) -> None:
    """Lets all sessions of this process be recorded; to be called before TensorFlow is imported."""
    sys.meta_path.insert(0, _Finder(recording, rank))


class _Finder(importlib.abc.MetaPathFinder):
    """Finds the one module as Python does, and wraps what loads it."""

    def __init__(self, recording: Recording, rank: int):
        self._recording = recording
        self._rank = rank

    def find_spec(self, name: str, path: Any, target: Any = None) -> importlib.machinery.ModuleSpec | None:
        if name != _MODULE:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        if spec is not None and spec.loader is not None:
            load = spec.loader.exec_module

            def exec_module(module: types.ModuleType) -> None:
                load(module)
                module.BaseSession.run = _recorded(module.BaseSession.run, self._recording, self._rank)

            spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec


def _recorded(run: Callable, recording: Recording, rank: int) -> Callable:
    """A session's `run` that a recorder stands around."""

    @functools.cache
    def recorder() -> Any:
        # Not earlier: it needs TensorFlow as a whole.
        from npu_bridge.reporting.step_recorder import StepRecorder

        return StepRecorder(recording.steps, recording.path_of(rank), rank)

    @functools.wraps(run)
    def recorded(self, fetches, feed_dict=None, options=None, run_metadata=None):
        return recorder().run(run, self, fetches, feed_dict, options, run_metadata)

    return recorded
