"""Makes the errors of operators that need an NPU; each error names a replacement."""

from __future__ import annotations

from typing import Any, Callable, NoReturn

from npu_bridge.base.errors import message


def not_available_error(name: str, reason: str, alternative: str) -> NotImplementedError:
    """Returns the error of an operator that TensorFlow cannot compute.

    Args:
      name: the operator, as scripts write it.
      reason: a noun phrase that describes the operator; in the message it follows "got".
      alternative: one sentence that says what to use.
    """
    return NotImplementedError(
        message(name, "not available", "an operator that TensorFlow can compute", reason, alternative)
    )


def unavailable_function(name: str, reason: str, alternative: str) -> Callable[..., NoReturn]:
    """Returns a function for scripts to import, which raises the error of `not_available_error` when it is called."""

    def refuse(*_: Any, **__: Any) -> NoReturn:
        raise not_available_error(name, reason, alternative)

    refuse.__name__ = refuse.__qualname__ = name.rpartition(".")[2]
    refuse.__doc__ = f"Raises NotImplementedError: it is {reason}. {alternative}"
    return refuse
