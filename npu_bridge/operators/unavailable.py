"""The error of operators that need an NPU, which says what to use instead."""

from __future__ import annotations

from typing import Any, Callable, NoReturn

from npu_bridge.base.errors import message


def not_available(name: str, reason: str, alternative: str) -> NotImplementedError:
    """The error of an operator that TensorFlow cannot stand in for.

    Args:
      name: the operator, as scripts spell it.
      reason: what it is, as the end of "got a call of ...".
      alternative: one sentence saying what to do.
    """
    return NotImplementedError(
        message(name, "not available", "an operator that TensorFlow can compute", reason, alternative)
    )


def unavailable(name: str, reason: str, alternative: str) -> Callable[..., NoReturn]:
    """A function that raises this error whatever it is called with, so that only a call fails and not an import."""

    def refuse(*_: Any, **__: Any) -> NoReturn:
        raise not_available(name, reason, alternative)

    refuse.__name__ = refuse.__qualname__ = name.rpartition(".")[2]
    refuse.__doc__ = f"Not available: {reason}. {alternative}"
    return refuse
