"""Holds functions that cases share: values of tensors, and names of variables."""

from __future__ import annotations

import numpy as np
import tensorflow.compat.v1 as tf


def value(tensors, feeds=None, start=True):
    """Values of tensors in a new session with initialised variables and tables."""
    with tf.Session() as session:
        if start:
            session.run([tf.global_variables_initializer(), tf.local_variables_initializer(), tf.tables_initializer()])
        return session.run(tensors, feeds)


def names():
    """Names of all variables, sorted."""
    return sorted(var.op.name for var in tf.global_variables())


def close(found, expected, tolerance=1e-5):
    """Both are the same but for rounding."""
    np.testing.assert_allclose(found, expected, rtol=tolerance, atol=tolerance)


def error_of(kind, function, *arguments, **options):
    """The text of the error of this kind that a call has to raise."""
    try:
        function(*arguments, **options)
    except kind as error:
        return str(error)
    raise AssertionError(f"no {kind} from {arguments} {options}")
