"""Describes the exception that ends a rank: a summary, the traceback, and whether the failure is secondary."""

from __future__ import annotations

import re
import time
import traceback
from typing import Any

from npu_bridge.collective.lost_rank import tells_of_lost_rank
from npu_run.rank.trace import format_traceback

# A report fits into the link's buffer, so that sending it never waits for the launcher.
_TRACE_CHARACTERS = 16_000
_SUMMARY_CHARACTERS = 1_000
# How TensorFlow 2.15 names the op that failed: in graphs below the reason, in eager code after it.
_NODE = re.compile(r"\[\[\{?\{?(?:node )?([^\s{}\]]+)")
_EAGER_OP = re.compile(r"\s*\[Op:\w+\](?: name: ?(\S*))?\s*$")
# The line above the Python frames of an error in a function; the reason follows them.
_IN_FUNCTION = "in user code:"
_FUNCTION_PREFIX = re.compile(r"^\{\{function_node [^}]*\}\}\s*")


def describe_exception(error: BaseException, script: str, code: int) -> dict[str, Any]:
    """Returns the facts about an exception, ready for JSON.

    Args:
      error: the exception that ended the script.
      script: the script's path, as compiled.
      code: exit code with which the rank will end.
    Returns:
      A dict: `when` (on the monotonic clock), `code`, `summary` (one line), `tensor` (the op that TensorFlow names, or
      ""), `trace` (without frames above the script) and `secondary` (whether the error only says that another rank is
      gone).
    """
    summary, tensor = _find_reason_and_op(error)
    return {
        "when": time.monotonic(),
        "code": code,
        "summary": summary[:_SUMMARY_CHARACTERS],
        "tensor": tensor[:_SUMMARY_CHARACTERS],
        "trace": format_traceback(error, script)[-_TRACE_CHARACTERS:],
        "secondary": tells_of_lost_rank(error),
    }


def _find_reason_and_op(error: BaseException) -> tuple[str, str]:
    """Returns the reason for an error in one line, and the op that the error names, or ""."""
    if isinstance(error, SystemExit):
        return f"sys.exit({error.code!r})", ""
    name = type(error).__name__
    lines = [line for line in traceback.format_exception_only(type(error), error)[-1].splitlines() if line.strip()]
    lines = lines or [name]
    if lines[0].endswith(_IN_FUNCTION):
        reason = _reason_in_function(lines)
        name = reason.partition(":")[0]
        # Below the reason there can be a node: of a session that ran while the function was traced.
        lines = [reason, *(f"\t{line.strip()}" for line in lines if _NODE.search(line))]
    # TensorFlow's own errors have many lines: the reason is just above the node.
    for above, line in zip(lines, lines[1:]):
        node = _NODE.search(line)
        if node and line.startswith("\t"):
            return f"{name}: {_FUNCTION_PREFIX.sub('', above.strip())} (in {node.group(1)})", node.group(1)
    reason = lines[0].strip().partition(f"{name}: ")[2] if f"{name}: " in lines[0] else ""
    reason = _FUNCTION_PREFIX.sub("", reason)
    eager_op = _EAGER_OP.search(reason)
    if eager_op:
        tensor = (eager_op.group(1) or "").strip()
        reason = reason[: eager_op.start()] + (f" (in {tensor})" if tensor else "")
        return f"{name}: {reason}", tensor
    return (f"{name}: {reason}" if reason else lines[0].strip()) + (" ..." if len(lines) > 1 else ""), ""


def _reason_in_function(lines: list[str]) -> str:
    """Returns the reason below the frames in a function's error text; for nested errors, the innermost reason."""
    start = max(number for number, line in enumerate(lines) if line.endswith(_IN_FUNCTION)) + 1
    frame_indent = None
    for line in lines[start:]:
        indent = len(line) - len(line.lstrip())
        if line.lstrip().startswith('File "'):
            frame_indent = indent
        elif frame_indent is None or indent <= frame_indent:
            return line.strip()
    return lines[0].strip()
