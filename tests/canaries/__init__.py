"""One call of every function that reaches private names of TensorFlow, Keras, Estimator and Horovod, as they are used.

A canary raises when a new version no longer does what the function says. It runs in a graph of its own, or eagerly if
it is made that way; those of `RANK_CANARIES` run on every rank of a job.
"""

from __future__ import annotations

import contextlib
import types

import tensorflow as tf

# Lists, by function.
CANARIES: dict = {}
RANK_CANARIES: dict = {}


def canary_of(*functions, eagerly=False, on_ranks=False):
    """Keeps what is decorated as a canary of these functions."""

    def keep(check):
        def run():
            with contextlib.nullcontext() if eagerly or on_ranks else tf.Graph().as_default():
                check()

        for function in functions:
            (RANK_CANARIES if on_ranks else CANARIES).setdefault(function, []).append(run)
        return check

    return keep


def functions_of(module):
    """The public functions that a module defines."""
    return [
        value
        for name, value in vars(module).items()
        if isinstance(value, types.FunctionType) and value.__module__ == module.__name__ and not name.startswith("_")
    ]


def expect(is_so, text):
    """Raises AssertionError with a text if something is not so."""
    if not is_so:
        raise AssertionError(text)


@contextlib.contextmanager
def kept(owner, *names):
    """Restores attributes of an object at the end of the block, whatever a canary sets them to."""
    before = [getattr(owner, name) for name in names]
    try:
        yield
    finally:
        for name, value in zip(names, before):
            setattr(owner, name, value)
