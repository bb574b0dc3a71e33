"""Makes the error of operators that need an NPU, which names a replacement."""

from __future__ import annotations

from typing import Any, Callable, NoReturn

from npu_bridge.base.errors import message


def not_available(name: str, reason: str, alternative: str) -> NotImplementedError:
    """Returns the error of an operator that TensorFlow cannot replace.

    Args:
      name: the operator, as scripts spell it.
      reason: its nature, as the end of "got a call of ...".
      alternative: one sentence with the cure.
    """
    return NotImplementedError(
        message(name, "not available", "an operator that TensorFlow can compute", reason, alternative)
    )


def unavailable(name: str, reason: str, alternative: str) -> Callable[..., NoReturn]:
    """Returns a function that raises this error for any arguments, so that only a call fails and not an import."""

    def refuse(*_: Any, **__: Any) -> NoReturn:
        raise not_available(name, reason, alternative)

    refuse.__name__ = refuse.__qualname__ = name.rpartition(".")[2]
    refuse.__doc__ = f"Raises NotImplementedError: it is {reason}. {alternative}"
    return refuse
