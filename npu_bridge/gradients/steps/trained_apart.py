"""Counts the steps of each list of variables, for one optimizer that trains several lists in separate steps."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from npu_bridge.base.own_tensorflow import tf
from npu_bridge.gradients.graph_mode import check_made_in_this_graph, state_variable


class CountersByVariables:
    """The counters of one stage: usually one, and another one for each list of variables that is trained apart.

    A generator and its discriminator, for example, can be trained in turn by one optimizer. Each has windows and turns
    of its own, so that a step of one does not count for the other.

    Args:
      name: name of the counters.
      dtype: dtype of the counters, scalars that begin at 0.
      joins_lists: whether lists with a common variable have one counter, for a stage that keeps something of each
        variable until the counter is full.
    Attributes:
      counters: all counters, in the order in which the lists were trained first; empty before the first use.
      are_lists_mixed: whether two steps had some variables in common, and others not.
    """

    def __init__(self, name: str, dtype: tf.DType = tf.int64, joins_lists: bool = False):
        self._name = name
        self._dtype = dtype
        self._joins_lists = joins_lists
        self._lists: list[set] = []
        self._others: tf.Module | None = None  # where object-based checkpoints find counters that are made later
        self.counters: list[tf.Variable] = []
        self.are_lists_mixed = False

    def state(self) -> dict:
        """Returns what checkpoints save: the first counter under its name, the others below `<name>_apart`."""
        if self._others is None:
            self._others = tf.Module(name="others")
            self._add_counter()
        return {self._name: self.counters[0], f"{self._name}_apart": self._others}

    def counter_of(self, variables: Sequence[Any]) -> tf.Variable:
        """Returns the counter of a list of variables; makes a counter for a new list."""
        self.state()
        if not self._lists:  # later lists get counters of their own graph
            check_made_in_this_graph(self.counters)
        trained = {variable.ref() for variable in variables}
        self.are_lists_mixed |= any(known & trained and known != trained for known in self._lists)
        for number, known in enumerate(self._lists):
            if known == trained or not trained or (self._joins_lists and known & trained):
                known |= trained
                return self.counters[number]
        self._lists.append(trained)
        if len(self._lists) > len(self.counters):
            self._add_counter()
            setattr(self._others, f"counter_{len(self.counters) - 1}", self.counters[-1])
        return self.counters[len(self._lists) - 1]

    def _add_counter(self):
        self.counters.append(state_variable(lambda: tf.zeros([], self._dtype), self._name))
