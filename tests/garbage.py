"""Fewer looks for garbage: modules of TensorFlow are a million objects that stay, and graphs come by the thousand."""

from __future__ import annotations

import gc

_OBJECTS = 20_000


def seldom_collect():
    """To be called when all is loaded: what is there is not looked at again, and what comes less often."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(_OBJECTS)
