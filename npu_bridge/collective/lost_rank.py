"""Recognises errors that only say that another rank is gone."""

from __future__ import annotations

# Phrases of Horovod (0.28, Gloo) and of TensorFlow (2.15) on the remaining ranks when another rank is gone or silent.
_PHRASES = (
    "HorovodInternalError",
    "Horovod has been shut down",
    "Connection closed by peer",
    "Connection reset by peer",
    "Timed out waiting",
    "gloo/transport/tcp",
    "Collective ops is aborted",
    "collective ops already aborted",
    "Socket closed",
)


def tells_of_lost_rank(error: BaseException) -> bool:
    """Returns whether an error, or one of its causes, only says that another rank is gone."""
    seen: list[BaseException] = []
    cause: BaseException | None = error
    while cause is not None and cause not in seen:
        seen.append(cause)
        names = " ".join(base.__name__ for base in type(cause).__mro__)
        if any(words in f"{names} {cause}" for words in _PHRASES):
            return True
        cause = cause.__cause__ or (None if cause.__suppress_context__ else cause.__context__)
    return False
