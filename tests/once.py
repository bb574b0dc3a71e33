"""Forgets the once-only lines of a process: a case gets them whatever earlier cases in the process have done."""

from __future__ import annotations

import contextlib
import logging
import sys

_SAID_ONCE = (
    ("npu_bridge.base.errors", "say_on_terminal"),
    ("npu_bridge.base.errors", "say_once"),
    ("npu_bridge.collective.checks.exchanges", "_warn_ranks_train_apart_once"),
)


def forget_what_was_said():
    """Lets messages be said anew; imports nothing."""
    for module, name in _SAID_ONCE:
        if module in sys.modules:
            getattr(sys.modules[module], name).cache_clear()


@contextlib.contextmanager
def lines_said(*modules):
    """Collects the messages that modules (without names, `base.errors`) log, as if none had been logged before."""
    forget_what_was_said()
    lines, handler = [], logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())
    loggers = [logging.getLogger(module) for module in modules or ("npu_bridge.base.errors",)]
    for logger in loggers:
        logger.addHandler(handler)
    try:
        yield lines
    finally:
        for logger in loggers:
            logger.removeHandler(handler)
