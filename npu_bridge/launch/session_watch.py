"""Standing around every session run of a rank before the script, or even TensorFlow, is there.

The class of all sessions is changed at the moment its module has been loaded.
"""

from __future__ import annotations

import functools
import types
from typing import Any, Callable

from npu_bridge._after_import import after_import
from npu_bridge.launch.timeline import Recording
from npu_bridge.tf_internals.names import SESSION_MODULE

__all__ = ["record_sessions"]


def record_sessions(recording: Recording, rank: int) -> None:
    """Lets all sessions of this process be recorded; to be called before TensorFlow is imported."""

    def change(module: types.ModuleType) -> None:
        module.BaseSession.run = _recorded(module.BaseSession.run, recording, rank)

    after_import(SESSION_MODULE, change)


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
