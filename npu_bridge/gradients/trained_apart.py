"""Counts the steps of each list of variables, for one optimizer that trains several lists in separate steps."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Callable

from npu_bridge.base.own_tensorflow import tf


class CountersByVariables:
    """The counters of one stage: usually one, and another one for each list of variables that is trained apart.

    A generator and its discriminator, for example, can be trained in turn by one optimizer. Each has windows and turns
    of its own, so that a step of one does not count for the other.

    Args:
      make: function that makes the counter of a number; 0 is the first list.
    Attributes:
      counters: all counters, in the order in which the lists were trained first.
      are_lists_mixed: whether two steps had some variables in common, and others not.
    """

    def __init__(self, make: Callable[[int], tf.Variable]):
        self._make = make
        self._lists: list[set] = []
        self._others = tf.Module(name="others")  # where object-based checkpoints find counters that are made later
        self.counters = [make(0)]
        self.are_lists_mixed = False

    def by_name(self, name: str) -> dict:
        """Returns what checkpoints save: the first counter under `name`, the others below `<name>_apart`."""
        return {name: self.counters[0], f"{name}_apart": self._others}

    def counter_of(self, variables: Sequence[Any]) -> tf.Variable:
        """Returns the counter of the list that shares a variable with `variables`; makes a counter for a new list."""
        trained = {variable.ref() for variable in variables}
        for number, known in enumerate(self._lists):
            if known & trained or not trained:
                self.are_lists_mixed = self.are_lists_mixed or bool(trained) and known != trained
                known |= trained
                return self.counters[number]
        self._lists.append(trained)
        if len(self._lists) > len(self.counters):
            self.counters.append(self._make(len(self.counters)))
            setattr(self._others, f"counter_{len(self.counters) - 1}", self.counters[-1])
        return self.counters[len(self._lists) - 1]
