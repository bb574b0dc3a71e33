"""Telling TF 1 graphs from functions and eager execution."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable
from typing import Any

import tensorflow as tf

from npu_bridge.tf_internals.training import initialise_in_keras_session


def building_graph() -> bool:
    """True while a TF 1 graph is built; False eagerly and inside a `tf.function`."""
    return not tf.executing_eagerly() and not tf.compat.v1.get_default_graph().building_function


def initialise_with_keras(variables: Iterable[Any]) -> None:
    """Has a Keras session initialise variables of the TF 1 graph being built; elsewhere it does nothing.

    Such a session initialises the variables it is told about, and no others.
    """
    if building_graph():
        for variable in variables:
            initialise_in_keras_session(variable)


@contextlib.contextmanager
def classic_control_flow():
    """Inside, `tf.cond` builds switches and merges, as TF 1 does, instead of one op that holds a function.

    A function cannot assign to TF 1 reference variables, and its inputs are one list: with switches every update
    waits for the decision and for its own gradient only.
    """
    was_on = tf.compat.v1.control_flow_v2_enabled()
    tf.compat.v1.disable_control_flow_v2()
    try:
        yield
    finally:
        if was_on:
            tf.compat.v1.enable_control_flow_v2()
