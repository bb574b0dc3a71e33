"""Fewer looks for garbage: modules of TensorFlow are a million objects that stay, and graphs come by the thousand."""

from __future__ import annotations

import gc

_OBJECTS = 20_000


def seldom_collect():
    """Makes collections rare, and leaves existing objects out of them; call it when all is loaded, and after a case."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(_OBJECTS)
