"""Defines options of single functions, which are checked and kept: all functions follow `global_options()` instead."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator
from typing import Any

from npu_bridge.base.errors import say_once
from npu_device.configs.option_tree import Leaf, OptionTree

__all__ = ["RunContextOptions", "npu_run_context"]

_DECLARED = {
    "experimental": {"graph_memory_optimize_config": {"recompute": Leaf(), "graph_slice": Leaf()}},
    "jit_compile": Leaf(),
}


class RunContextOptions(OptionTree):
    """Options for functions called inside `npu_run_context`; they are kept without effect.

    Raises:
      ValueError: a script sets an attribute that is not an option.
    """

    def __init__(self):
        super().__init__("npu_device.configs.run_context_options()", _DECLARED)


@contextlib.contextmanager
def npu_run_context(options: Any = None) -> Iterator[None]:
    """Has no effect: functions called inside the block follow the options of the process.

    Args:
      options: a `run_context_options()`, or None.
    """
    if isinstance(options, OptionTree) and options.changed_options():
        say_once(
            logging.INFO, f"npu_device.npu_run_context: kept without an effect: {', '.join(options.changed_options())}."
        )
    yield
