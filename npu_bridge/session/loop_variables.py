"""Creates and loads the loop variables, which set how many steps one `session.run` makes (`iterations_per_loop`).

Scripts of this interface create and load four variables. Here only `iterations_per_loop` has an effect.
"""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from npu_bridge.base import environment
from npu_bridge.base.terminal import logger
from npu_bridge.base.tf_internals.sessions import plain_session
from npu_bridge.session.iterations import train_in_loops

_LOG = logger(__name__)
tf1 = tf.compat.v1
_SCOPE = "npu_runconfig"
LOOP_VARIABLES = ("iterations_per_loop", "loop_cond", "zero", "one")


def loop_variable(name: str) -> tf.Variable:
    """Returns one of `LOOP_VARIABLES`, a local int64 scalar, not trainable; the first call in a graph creates it.

    Raises:
      RuntimeError: the graph has several loop variables of this name.
    Graph: variable `npu_runconfig/<name>`, in the local variables and in a collection of its own.
    """
    collection = f"{_SCOPE}_{name}"
    found = tf1.get_collection(collection)
    if len(found) > 1:
        raise RuntimeError(
            f"{_SCOPE}: the graph has several loop variables with the same name. Expected one in the collection "
            f"{collection!r}; got {len(found)}. Do not change this collection."
        )
    if found:
        return found[0]
    with tf1.variable_scope(_SCOPE, reuse=tf1.AUTO_REUSE), tf.control_dependencies(None):
        return tf1.get_variable(
            name,
            shape=[],
            dtype=tf.int64,
            initializer=tf1.zeros_initializer(),
            trainable=False,
            collections=[collection, tf1.GraphKeys.LOCAL_VARIABLES],
            use_resource=True,
        )


def create_loop_variables() -> dict[str, tf.Variable]:
    """Returns the four loop variables of the default graph, by name."""
    return {name: loop_variable(name) for name in LOOP_VARIABLES}


def load_loop_variables(session: Any, variables: dict[str, tf.Variable], steps_per_run: int) -> None:
    """Sets the loop variables in a live session, without calling its hooks, and makes the session train in loops.

    The variable `iterations_per_loop` is set to one less than the number of training steps in a run.
    """
    steps_per_run = environment.options_set_by_launcher().get("iterations_per_loop", steps_per_run)
    session = plain_session(session)
    for name, value in zip(LOOP_VARIABLES, (steps_per_run - 1, 0, 0, 1)):
        initializer = variables[name].initializer
        session.run(initializer, {initializer.inputs[1]: value})
    train_in_loops(session, steps_per_run)
    if environment.probable_rank() == 0:
        _LOG.info(
            "iterations_per_loop: a run trains %d steps, then one more, which yields the fetches.", steps_per_run - 1
        )
