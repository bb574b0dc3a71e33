"""Collects garbage for tests: all of it when a case asks, and seldom otherwise."""

from __future__ import annotations

import gc
import threading

_OBJECTS = 20_000
_OLDEST = 2


def collect_garbage():
    """Collects all garbage, also while another thread collects: `gc.collect` alone does nothing then."""
    thread, collections = threading.get_ident(), []

    def record(phase, info):
        if phase == "stop" and info["generation"] == _OLDEST and threading.get_ident() == thread:
            collections.append(info)

    gc.callbacks.append(record)
    try:
        while not collections:
            gc.collect()
    finally:
        gc.callbacks.remove(record)


def seldom_collect():
    """Makes collections rare, and leaves existing objects out of them; call it when all is loaded, and after a case.

    Modules of TensorFlow are a million objects that stay, and graphs come by the thousand.
    """
    collect_garbage()
    gc.freeze()
    gc.set_threshold(_OBJECTS)
