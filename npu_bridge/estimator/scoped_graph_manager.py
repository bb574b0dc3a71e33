"""`ScopedGraphManager`: the scope around the run that initialises variables."""

from __future__ import annotations

import logging
from typing import Any

from npu_bridge.base.errors import say_once

__all__ = ["ScopedGraphManager"]


class ScopedGraphManager:
    """On the NPU stack, frees the graph that initialises variables; here sessions keep nothing that could be freed.

    Put it around the run of the initialiser and around nothing else.

    Ranks: local.
    Example:
      with scoped_graph_manager.ScopedGraphManager():
          session.run(tf.global_variables_initializer())
    """

    def __enter__(self) -> ScopedGraphManager:
        self.start()
        return self

    def __exit__(self, *_: Any) -> None:
        self.stop()

    def start(self) -> None:
        """Does what entering does: a line in the log, once."""
        say_once(logging.INFO, "ScopedGraphManager: has no effect on stock TensorFlow.")

    def stop(self) -> None:
        """Does nothing, as does leaving."""
