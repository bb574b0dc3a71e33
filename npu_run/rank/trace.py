"""Formats the traceback of an exception that ends a script: frames of the user's files, then the reason, once.

`NPU_BRIDGE_VERBOSE=1` also shows frames of libraries, and the lines that TensorFlow repeats.
"""

from __future__ import annotations

import itertools
import os
import re
import traceback
import types
from collections.abc import Iterable

from npu_bridge.base import environment
from npu_bridge.base.machine import project_package_folders

# Files of the import hook for scripts of TensorFlow 1, in which a traceback can end.
_IMPORT_HOOK_FILES = tuple(os.path.join("tensorflow1_compat", name) for name in ("imports.py", "proxies.py"))
_LIBRARIES = (os.path.dirname(os.__file__), "<frozen ", "<__array")
_LIBRARIES += tuple(os.path.join(folder, "") for folder in project_package_folders())
_INSTALLED = re.compile(r"[/\\]((site|dist)-packages[/\\]|__autograph_generated_file)")
_FRAME = re.compile(r'\s*File "([^"]*)", line (\d+)')
# How TensorFlow 2.15 reports a failed graph: where its nodes were made, then the reason, then the nodes again.
_GRAPH_ERROR = re.compile(r": Graph execution error:\s*")
_DETECTED = re.compile(r"Detected at node '?([^\s']+)'? defined at")
_IN_FUNCTION = "in user code:"  # frames of a function, and the error itself below them
_ORIGIN = "Original stack trace for "
_ADVICE = " (npu-run --verbose shows them)"


def script_frames(error: BaseException, script: str) -> types.TracebackType | None:
    """Returns the traceback from the first frame of the script on, without the launcher's frames.

    If the last frames belong to this package's import hook, the traceback ends at the import statement.
    """
    first = error.__traceback__
    while first is not None and first.tb_frame.f_code.co_filename != script:
        first = first.tb_next
    last = frame = first
    while frame is not None:
        if not frame.tb_frame.f_code.co_filename.endswith(_IMPORT_HOOK_FILES):
            last = frame
        frame = frame.tb_next
    if last is not None:
        last.tb_next = None
    return first


def format_traceback(error: BaseException, script: str) -> str:
    """Returns a traceback as text, without library frames unless `NPU_BRIDGE_VERBOSE=1`.

    Args:
      error: the exception that ended the script.
      script: the script's path, as its code object names it.
    """
    frames = script_frames(error, script)
    if environment.is_flag_on(environment.VERBOSE) or hasattr(
        error, "exceptions"
    ):  # an exception group has several reasons
        return "".join(traceback.format_exception(type(error), error, frames))
    stack = traceback.extract_tb(frames)
    seen = {(frame.filename, frame.lineno) for frame in stack}
    hides_last_frame = isinstance(error, KeyboardInterrupt) or type(error).__module__.startswith("tensorflow.")
    lines = _format_user_frames(stack, hides_last_frame)
    lines += [f"{line}\n" for line in _shorten_reason(_format_reason(error), seen)]
    cause = error.__cause__ or (None if error.__suppress_context__ else error.__context__)
    if cause is not None and str(cause).strip().partition("\n")[0] not in str(error):
        own = [frame for frame in traceback.extract_tb(cause.__traceback__) if _is_user_file(frame.filename)]
        place = f", {own[-1].filename}, line {own[-1].lineno}" if own else ""
        lines.append(f"  because of {_format_reason(cause).partition(chr(10))[0]}{place}\n")
    return "".join(lines)


def _is_user_file(file: str) -> bool:
    return not file.startswith(_LIBRARIES) and not _INSTALLED.search(file)


def _format_reason(error: BaseException) -> str:
    return "".join(traceback.format_exception_only(type(error), error))


def _format_user_frames(stack: traceback.StackSummary, hides_last_frame: bool) -> list[str]:
    def is_shown(frame):
        # A last library frame helps, unless its line is a `raise` statement: then the reason says enough.
        is_break = frame is stack[-1] and not hides_last_frame and not (frame.line or "raise").startswith("raise")
        return is_break or _is_user_file(frame.filename)

    lines, advice = [], _ADVICE
    for shown, frames in itertools.groupby(stack, is_shown):
        run = traceback.StackSummary.from_list(frames)
        if shown:
            lines += run.format()
        else:
            lines.append(f"  ... {len(run)} frame{'s' if len(run) > 1 else ''} of libraries{advice}\n")
            advice = ""
    return ["Traceback (most recent call last):\n", *lines] if lines else lines


def _shorten_reason(text: str, seen: set[tuple[str, int | None]]) -> list[str]:
    """Returns an error's lines without library frames, and, for each TensorFlow node in them, the line that made it."""
    kept, made, node, place = [""], [], "", ""
    for line in _without_library_frames(_GRAPH_ERROR.sub(": ", text).partition(_ORIGIN)[0].splitlines()):
        detected, frame = _DETECTED.search(line), _FRAME.match(line)
        if node and frame:
            is_seen = (frame[1], int(frame[2])) in seen
            place = "" if is_seen else f"  {node} was made here:\n  {line.strip()}"
        if detected or (node and line.strip() and not frame):
            made += [place] if node and place else []
            kept[-1] += line[: detected.start()] if detected else ""
            node, place = (detected[1] if detected else ""), ""
        if detected or node or not line.strip() or line.startswith("Node: "):
            continue
        if kept[-1].endswith(_IN_FUNCTION) and not frame:
            kept[-1] = line.strip()
        elif kept[-1].endswith(": ") or not kept[-1]:
            kept[-1] += line
        else:
            kept.append(line)
    return [*kept, *made]


def _without_library_frames(lines: Iterable[str]) -> Iterable[str]:
    """Yields lines without library frames: leaves out a library frame's location and the code indented below."""
    dropped = None
    for line in lines:
        indent = len(line) - len(line.lstrip())
        frame = _FRAME.match(line)
        if dropped is not None and not frame and line.strip() and indent > dropped:
            continue
        dropped = indent if frame and not _is_user_file(frame[1]) else None
        if dropped is None:
            yield line
