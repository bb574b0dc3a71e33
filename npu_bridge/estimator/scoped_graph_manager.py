"""Defines `ScopedGraphManager`: the scope around the run that initialises variables."""

from __future__ import annotations

import logging
from typing import Any

from npu_bridge.base.errors import say_once

__all__ = ["ScopedGraphManager"]


class ScopedGraphManager:
    """Has no effect here; on the NPU stack frees the graph that initialises variables.

    Put only the session run of the initialiser inside the `with` block.

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
        """Logs once that the class has no effect; entering the `with` block calls this method."""
        say_once(logging.INFO, "ScopedGraphManager has no effect on stock TensorFlow.")

    def stop(self) -> None:
        """Does nothing; leaving the `with` block calls this method."""
