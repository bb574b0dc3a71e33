"""Samples the stack of a rank's main thread: finds the call in which it is stuck, and whether it waits for other ranks.

Horovod 0.28 has a stall check, but with Gloo the check never reports, because it reads a list of ranks that only the
MPI controller fills. So a rank samples itself. If a call has not returned between two samples, both samples find the
same frame at the same instruction. Frames are recognised by a mark and are not kept: a kept frame would delete a
function's objects late and in another thread, in which TensorFlow cannot leave the graph of an unfinished generator.
"""

from __future__ import annotations

import contextlib
import gc
import linecache
import os
import sys
import traceback
import types
from collections.abc import Iterator
from typing import Any, NamedTuple

from npu_bridge.base.machine import is_installed_code
from npu_bridge.base.tf_internals.names import INPUT_OF_ESTIMATOR, executes_operators
from npu_run.rank.processor_time import is_process_blocked, processor_secs

# Shorter calls are normal and not reported.
_NOTICE_SECS = 2.0
# Interval for sampling a stuck thread again, and the share of it that a rank must compute to count as busy: sampling
# costs a thousandth, a training step far more.
_AGAIN_SECS = 2.0
_BUSY_SHARE = 0.02
# How many samples in a row must find the process blocked. Samples are counted because seconds also pass on a machine
# that is suspended.
_BLOCKED_SAMPLES = 4
# Keras calls these to wait for ranks. C code that it enters itself waits for none: it frees an iterator, for example,
# which can take TensorFlow up to a minute.
_RUNTIMES = ("tensorflow", "horovod", "tensorflow_estimator")
_LOCKS = ("threading", "queue")  # where Python waits for another thread of the process
# Where a rank waits for others in this package's own code.
_MEETINGS = ("npu_bridge.collective.rendezvous.barrier", "npu_bridge.collective.engines.horovod_restart")
# The file name of the functions that TensorFlow generates for operators of other libraries, such as Horovod's.
_GENERATED = "<string>"
_CODE_CHARACTERS = 60
# Marks of an input pipeline that runs Python code: TensorFlow calls back through the first file, generators of tf.data
# through the second, and an Estimator builds its input in a function of that name.
_CALLED_BACK, _OF_DATA = os.path.join("ops", "script_ops.py"), os.path.join("python", "data", "ops", "")

_is_paused = False  # whether garbage collection is switched off while frames are read

_Stack = list[tuple[types.CodeType, int]]  # code and line of each frame, the innermost first


class _Sample(NamedTuple):
    """The state of all threads while the sampled thread is stuck, as their frames show it.

    Attributes:
      stacks: by identifier of the thread.
      is_waiting: by identifier of the thread, whether it waits for another Python thread or for operators.
      waits: whether the sampled thread waits for other ranks.
      is_collecting: whether garbage is being collected.
    """

    stacks: dict[int, _Stack]
    is_waiting: dict[int, bool]
    waits: bool
    is_collecting: bool


class MainThreadSampler:
    """Finds the call in which a thread is stuck, and whether the process computes meanwhile.

    Args:
      thread: identifier of the thread, as in `threading.get_ident()`.
    """

    def __init__(self, thread: int):
        self._thread = thread
        self._frame_id = self._instruction = -1
        self._since = self._busy_at = self._sampled_at = 0.0
        self._processor_secs: float | None = None
        self._blocked = 0
        self._last_report: dict[str, Any] | None = None
        self._is_over = False
        self._is_collecting = False
        gc.callbacks.append(self._record_garbage_collection)

    def _record_garbage_collection(self, phase: str, info: dict[str, int]) -> None:
        self._is_collecting = phase == "start"

    def end(self) -> None:
        """Ends the sampling."""
        self._is_over = True
        gc.callbacks.remove(self._record_garbage_collection)

    def sample(self, now: float) -> dict[str, Any] | None:
        """Samples the thread; call it about once a second.

        Args:
          now: seconds on the monotonic clock.
        Returns:
          A message for the launcher, or None if nothing is new. `{"stuck": {...}}`, with the fields of `StuckCall`, is
          returned if the thread has been in one call for a while, and on every change. `{"stuck": None}` is returned
          when the thread moves again.
        """
        was_told = self._last_report is not None
        with frames_of_threads() as frames:
            seen = self._sample_frames(frames, now)
        if seen is None:
            return {"stuck": None} if was_told and self._last_report is None else None
        busy_at = self._last_busy_time(now)
        is_idle = busy_at < now and was_told and not seen.is_collecting
        is_blocked = is_idle and is_process_blocked(seen.is_waiting)
        self._blocked = self._blocked + 1 if is_blocked else 0
        stuck = {
            "since": self._since,
            "where": _describe_position(seen.stacks[self._thread]),
            "waits": seen.waits,
            "busy_at": busy_at,
            "pipeline": _find_input_pipeline(seen.stacks, self._thread),
            "is_blocked": self._blocked >= _BLOCKED_SAMPLES,
        }
        self._processor_secs = processor_secs()  # read again: sampling itself takes some processor time
        is_new, self._last_report = stuck != self._last_report, stuck
        return {"stuck": stuck} if is_new else None

    def _sample_frames(self, frames: dict[int, types.FrameType], now: float) -> _Sample | None:
        """Returns the state of all threads if the sampled thread is stuck; None if it moved a moment ago."""
        frame = frames.get(self._thread)
        if frame is None or self._is_over:
            return None
        if not self._is_marked(frame) or frame.f_lasti != self._instruction:
            self._last_report = None
            self._put_mark(frame)
            self._instruction, self._since = frame.f_lasti, now
            return None
        began, enough_secs = (
            (self._since, _NOTICE_SECS) if self._last_report is None else (self._sampled_at, _AGAIN_SECS)
        )
        if now - began < enough_secs:
            return None
        return _Sample(
            _stacks_of(frames),
            {thread: _waits_for_thread_or_operators(innermost) for thread, innermost in frames.items()},
            # Garbage can hold iterators, which TensorFlow can take a minute to free.
            not self._is_collecting and _waits_for_ranks(frame),
            self._is_collecting,
        )

    def _is_marked(self, frame: types.FrameType) -> bool:
        """Returns whether a frame is the one that was marked last: Python makes each frame without a mark."""
        return id(frame) == self._frame_id and not frame.f_trace_lines

    def _put_mark(self, innermost: types.FrameType) -> None:
        """Marks a frame and no other, unless a debugger traces it: each sample then takes its call for a new one.

        The mark, `f_trace_lines`, has no effect on a frame without a debugger.
        """
        for frame, _ in traceback.walk_stack(innermost):
            frame.f_trace_lines = True
        innermost.f_trace_lines = innermost.f_trace is not None
        self._frame_id = id(innermost)

    def position(self) -> dict[str, str]:
        """Returns the thread's current position: a dict of `where` and `pipeline`, as in `StuckCall`."""
        with frames_of_threads() as frames:
            stacks = _stacks_of(frames)
        where = _describe_position(stacks[self._thread]) if self._thread in stacks else ""
        return {"where": where, "pipeline": _find_input_pipeline(stacks, self._thread)}

    def _last_busy_time(self, now: float) -> float:
        """Returns the time of the last sample in which this process computed, or else the time when the call began."""
        before, before_at = self._processor_secs, self._sampled_at
        self._processor_secs, self._sampled_at = processor_secs(), now
        if self._last_report is None:
            self._busy_at = self._since
        elif self._processor_secs is None or before is None:
            self._busy_at = now  # without a measurement the process counts as busy
        elif self._processor_secs - before > _BUSY_SHARE * (now - before_at):
            self._busy_at = now
        return self._busy_at


@contextlib.contextmanager
def frames_of_threads() -> Iterator[dict[int, types.FrameType]]:
    """Provides the innermost frame of each thread, and empties the dict at the end of the block.

    Read no file in the block: until it ends, the process collects no garbage.

    The frame of the calling thread refers to the dict, so both would live until Python collects garbage, with all
    objects of all threads' functions.

    Garbage collection is switched off in the block. Python makes objects for other threads' frames when they are read,
    and making one can collect garbage, which can run code of any object. From Python 3.11 on, the other thread can
    leave its frame meanwhile, and its memory is used again: the process crashes or stops. Python 3.11 before 3.11.8
    also holds a lock here, which deleting an object tied to threads needs (such as a `threading.local`, which every
    TensorFlow graph has): the process would deadlock (gh-106883).
    """
    global _is_paused
    is_collecting = _is_paused = gc.isenabled()
    gc.disable()
    frames: dict[int, types.FrameType] = {}
    try:
        frames.update(sys._current_frames())
        yield frames
    finally:
        frames.clear()
        _is_paused = False
        if is_collecting:
            gc.enable()


def _collect_in_child() -> None:
    """Switches garbage collection on again in a process that another thread has forked in the block."""
    if _is_paused:
        gc.enable()


os.register_at_fork(after_in_child=_collect_in_child)


def _waits_for_ranks(innermost_frame: types.FrameType) -> bool:
    frame: types.FrameType | None = innermost_frame
    while frame is not None and frame.f_code.co_filename == _GENERATED:
        frame = frame.f_back
    if frame is not None and _module_of(frame).partition(".")[0] in _RUNTIMES:
        return True
    return any(_module_of(frame) in _MEETINGS for frame, _ in traceback.walk_stack(innermost_frame))


def _waits_for_thread_or_operators(innermost: types.FrameType) -> bool:
    """Returns whether the thread of a frame waits for another Python thread or for operators."""
    module, code = _module_of(innermost), innermost.f_code
    is_horovod = code.co_filename == _GENERATED or module.partition(".")[0] == "horovod"
    return is_horovod or module in _LOCKS or executes_operators(module, code.co_name)


def _module_of(frame: types.FrameType) -> str:
    return str(frame.f_globals.get("__name__", ""))


def _stacks_of(frames: dict[int, types.FrameType]) -> dict[int, _Stack]:
    """Returns the code and the line of all frames of each thread. A frame between two lines has the number 0."""
    return {
        thread: [(frame.f_code, line or 0) for frame, line in traceback.walk_stack(innermost)]
        for thread, innermost in frames.items()
    }


def _describe_position(stack: _Stack) -> str:
    """Returns file, line and code of the innermost frame outside installed packages, or else of the innermost frame."""
    code, line = _innermost_of_script(stack) or stack[0]
    text = linecache.getline(code.co_filename, line).strip()
    text = text if len(text) <= _CODE_CHARACTERS else f"{text[:_CODE_CHARACTERS]}..."
    return f"{os.path.basename(code.co_filename)}:{line}" + (f" ({text})" if text else "")


def _innermost_of_script(stack: _Stack) -> tuple[types.CodeType, int] | None:
    return next((place for place in stack if not is_installed_code(place[0].co_filename)), None)


def _find_input_pipeline(stacks: dict[int, _Stack], main: int) -> str:
    """Returns file and line of the script's input pipeline if one of the pipeline's functions is running; else ""."""
    for thread, stack in stacks.items():
        if thread == main:
            is_input = any(code.co_name == INPUT_OF_ESTIMATOR for code, _ in stack)
        else:
            is_input = any(code.co_filename.endswith(_CALLED_BACK) for code, _ in stack) and any(
                _OF_DATA in code.co_filename for code, _ in stack
            )
        own = _innermost_of_script(stack) if is_input else None
        if own is not None:
            return f"{os.path.basename(own[0].co_filename)}:{own[1]}"
    return ""
