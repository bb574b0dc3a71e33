"""Turning an older TensorFlow on for one process: from then on the user's files see it, and nobody else does."""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import importlib.util
import sys
import types
from collections.abc import Sequence
from typing import Any

from npu_bridge.tf1 import faces, spawn
from npu_bridge.tf1.source import UserLoader
from npu_bridge.tf1.tables import OF_1
from npu_bridge.tf1.tables_of_2 import OF_2
from npu_bridge.tf1.tree import SourceTree

__all__ = ["decide", "enter", "is_decided", "switch_v2_off"]

_is_decided = False


def decide() -> None:
    """Says that the launcher knows what the script is, so that nobody else need find out."""
    global _is_decided
    _is_decided = True


def is_decided() -> bool:
    """Whether `decide` was called in this process."""
    return _is_decided


def enter(roots: Sequence[str], known_paths: Sequence[str] | None = None, era: int = 1) -> SourceTree:
    """Prepares this process for a script of TensorFlow 1, or one with old names of 2; TensorFlow is not imported yet.

    Args:
      roots: the user's source tree.
      known_paths: see `SourceTree`.
      era: 1 or 2.
    Returns:
      The tree.
    """
    decide()
    tree = SourceTree(roots, known_paths)
    faces.serve(tree, OF_1 if era == 1 else OF_2)
    tree.watch(UserLoader)
    spawn.follow(tree, era)
    if era == 2:
        return tree
    if "tensorflow" in sys.modules:
        switch_v2_off()
    else:
        sys.meta_path.insert(0, _AtTensorFlow())
    return tree


def switch_v2_off() -> None:
    """What TensorFlow 1.15 does by default: graphs, no resource variables, plain shapes and comparisons."""
    import tensorflow.compat.v1 as tf

    # One of the switches warns that it is about to be dropped, which a script of TensorFlow 1 need not hear.
    # The logger's own level, which as a rule is none: what the script sets for all loggers shall reach it.
    logger = tf.get_logger()
    level = logger.level
    logger.setLevel("ERROR")
    try:
        tf.disable_v2_behavior()
    finally:
        logger.setLevel(level)


class _AtTensorFlow(importlib.abc.MetaPathFinder):
    """Switches version 2 off at the moment TensorFlow has been loaded, whoever loads it."""

    def find_spec(self, name: str, path: Any, target: Any = None) -> importlib.machinery.ModuleSpec | None:
        if name != "tensorflow":
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        if spec is not None and spec.loader is not None:
            load = spec.loader.exec_module

            def exec_module(module: types.ModuleType) -> None:
                load(module)
                switch_v2_off()

            spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec
