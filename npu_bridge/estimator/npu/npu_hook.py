"""Session hooks of the documented interface."""

from __future__ import annotations

import tensorflow as tf

from npu_bridge import collective

__all__ = ["NPUBroadcastGlobalVariablesHook", "NpuEmptyHook", "broadcast_global_variables"]


class NPUBroadcastGlobalVariablesHook(tf.estimator.SessionRunHook):
    """Gives every rank the values that `root_rank` starts with.

    All global variables are sent: weights, slots, loss scale and its counters, batch statistics and `global_step`. So
    a resumed job goes on from the root's checkpoint on every rank, whatever the others found in theirs. It happens
    after the variables were initialised or restored, also when a session is recovered. With one rank it does nothing.

    Args:
      root_rank: the rank whose values are sent; required when there are several ranks.
      index: accepted for compatibility; the rank is known.
    Raises:
      ValueError: there are several ranks and `root_rank` is None or not one of them.
    Ranks: collective; every rank needs this hook, with the same `root_rank`.
    """

    def __init__(self, root_rank=None, index=None):
        self._root_rank = root_rank
        self._index = index
        self._broadcast = None
        size = collective.current().size
        if size > 1 and root_rank not in range(size):
            raise ValueError(
                f"NPUBroadcastGlobalVariablesHook: root_rank is not a rank. Expected an integer from 0 to {size - 1}; "
                f"got {root_rank!r}. Use 0."
            )

    def begin(self):
        self._broadcast = broadcast_global_variables(self._root_rank) if collective.current().size > 1 else None

    def after_create_session(self, session, coord):
        if self._broadcast is not None:
            session.run(self._broadcast)


class NpuEmptyHook(tf.estimator.SessionRunHook):
    """A hook that does nothing: the other branch of a conditional hook."""


def broadcast_global_variables(root_rank):
    """Assigns every global variable of the default graph the value it has on `root_rank`.

    Args:
      root_rank: the rank whose values are sent.
    Returns:
      The op to run once the variables have values; None when executed eagerly.
    Ranks: collective.
    """
    return collective.current().broadcast_variables(tf.compat.v1.global_variables(), root_rank)
