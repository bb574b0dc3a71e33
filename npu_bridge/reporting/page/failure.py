"""Describes the error that stopped a training, and renders the description for the page."""

from __future__ import annotations

import os
import re
import traceback
from collections.abc import Mapping
from html import escape
from typing import Any

from npu_bridge.base.machine import is_installed_code

_MESSAGE_CHARACTERS, _MOST_FRAMES = 2000, 20
_INTERRUPTED = "KeyboardInterrupt"
# The message of TensorFlow 2.15 for the failure of a graph: where the node was made, the reason, and both repeated.
_NODE = re.compile(
    r"Detected at node '?([^\s']+)'? defined at[^\n]*\n((?:[ \t][^\n]*\n|\n|<stack traces[^\n]*\n|Node: [^\n]*\n)*)"
)
_BEFORE_REASON = re.compile(rf"\AGraph execution error:\s*({_NODE.pattern})*")
_BEHIND_REASON = re.compile(r"\s*(\[\[\{?\{?node |Original stack trace for |Detected at node |Traceback \(most |\Z)")
_PLACE = re.compile(r'File "([^"]+)", line (\d+)')
# The frames, in a message, of Python code that a graph has called.
_FRAME_IN_TEXT = re.compile(r'^ *File "([^"]+)", line (\d+), in (.+)\n *(.*)', re.MULTILINE)


def describe_failure(error: BaseException, step: int | None, rank: int, is_secondary: bool = False) -> dict[str, Any]:
    """Returns a description of an error for the report, as plain data.

    Args:
      error: an error that a direct or indirect caller is handling.
      step: global step that was reached; None if unknown.
      rank: the rank that raised the error.
      is_secondary: whether the error only says that another rank is gone.
    """
    frames = [[frame.filename, frame.lineno, frame.name, frame.line or ""] for frame in _user_frames(error)]
    called = str(error).partition("Traceback (most recent call last):")[2].partition("Original stack trace")[0]
    for file, line, name, text in _FRAME_IN_TEXT.findall(called):
        if not is_installed_code(file):
            frames.append([file, int(line), name, text])
    op, node = getattr(error, "op", None), _NODE.search(str(error))  # for an error of a graph
    if op is not None:
        made = [(frame.filename, frame.lineno) for frame in op.traceback or ()]
    else:
        made = _PLACE.findall(node[2]) if node else []
    made = [place for place in made if not is_installed_code(place[0])]
    return {
        "type": type(error).__name__,
        "message": _extract_reason(str(error))[:_MESSAGE_CHARACTERS],
        "step": step,
        "rank": rank,
        "frames": frames[-_MOST_FRAMES:],
        "op": op.name if op is not None else node[1] if node else "",
        "made": "{}:{}".format(*made[-1]) if made else "",
        "secondary": is_secondary,
    }


def describe_stop(failure: Mapping[str, Any]) -> str:
    """Returns a few words on how a training was stopped."""
    return "interrupted" if failure.get("type") == _INTERRUPTED else f"stopped by {failure.get('type')}"


def render_failure(failure: Mapping[str, Any], ranks: int) -> str:
    """Renders the description of a failure as HTML."""
    step, how = failure.get("step"), describe_stop(failure)
    words = [how[:1].upper() + how[1:]]
    if step is not None:
        words.append(f"at step {step}" if step else "in the first step")
    if ranks > 1 and how != "interrupted":
        words.append(f"on rank {failure.get('rank')}")
    parts = [f"<h2>{escape(' '.join(words))}</h2>"]
    if failure.get("message"):
        parts.append(f"<pre>{escape(str(failure['message']))}</pre>")
    if failure.get("secondary"):
        parts.append("<p>Another rank has ended before; the output of the job says why.</p>")
    if failure.get("made"):
        said = f"The script makes the operator {failure.get('op')} at {_relative_path(str(failure['made']))}."
        parts.append(f"<p>{escape(said)}</p>")
    lines = [
        f"{_relative_path(str(file))}:{line} in {name}\n    {text}"
        for file, line, name, text in failure.get("frames") or ()
    ]
    if lines:
        frames = escape("\n".join(lines))
        parts.append(f'<p class="quiet">Where it happened, the innermost line last:</p><pre>{frames}</pre>')
    return f'<section class="failure">{"".join(parts)}</section>\n'


def _extract_reason(text: str) -> str:
    """Removes the text that TensorFlow adds around an error message."""
    text = _BEFORE_REASON.sub("", text.strip())
    return _BEHIND_REASON.split(text, maxsplit=1)[0]


def _user_frames(error: BaseException) -> traceback.StackSummary:
    """Returns the frames in the user's own files, from the script to the place of the error.

    A traceback begins at the function that handles the error; the callers of this function are read from the stack.
    """
    first = error.__traceback__
    walked = list(traceback.walk_stack(first.tb_frame.f_back))[::-1] if first and first.tb_frame.f_back else []
    walked += traceback.walk_tb(first)
    return traceback.StackSummary.extract(each for each in walked if not is_installed_code(each[0].f_code.co_filename))


def _relative_path(file: str) -> str:
    """Returns a path without the working directory."""
    return file.removeprefix(os.path.join(os.getcwd(), ""))
