"""Recognises errors that only say that another rank is gone."""

from __future__ import annotations

# Phrases of Horovod (0.28, Gloo) and of TensorFlow (2.15) on the remaining ranks when another rank is gone or silent.
_PHRASES = (
    "HorovodInternalError",
    "Horovod has been shut down",
    "gloo/transport/tcp",
    "Collective ops is aborted",
    "collective ops already aborted",
)
# In an error of another library, these are about a connection of the script itself.
_PHRASES_OF_CONNECTIONS = (
    "Connection closed by peer",
    "Connection reset by peer",
    "Timed out waiting",
    "Socket closed",
)
_LIBRARIES = ("horovod", "tensorflow")


def tells_of_lost_rank(error: BaseException) -> bool:
    """Returns whether an error, or one of its causes, only says that another rank is gone."""
    seen: list[BaseException] = []
    cause: BaseException | None = error
    while cause is not None and cause not in seen:
        seen.append(cause)
        classes = type(cause).__mro__
        is_of_library = any(each.__module__.partition(".")[0] in _LIBRARIES for each in classes)
        phrases = _PHRASES + (_PHRASES_OF_CONNECTIONS if is_of_library else ())
        text = " ".join([*(each.__name__ for each in classes), str(cause)])
        if any(words in text for words in phrases):
            return True
        cause = cause.__cause__ or (None if cause.__suppress_context__ else cause.__context__)
    return False
