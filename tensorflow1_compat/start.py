"""Switches a process to an older TensorFlow: from then on the user's files see it, and no other code does."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence

from npu_bridge.base.after_import import after_import
from npu_bridge.base.tf_internals.contrib import accept_whole_floats, add_larger_epsilons, load_generated_code_with
from npu_bridge.base.tf_internals.sessions import set_deterministic
from tensorflow1_compat import journal, old_attributes, proxies, spawn
from tensorflow1_compat.extensions import UserExtensionLoader
from tensorflow1_compat.source import UserLoader
from tensorflow1_compat.tables import OF_1
from tensorflow1_compat.tables_of_2 import tables_of
from tensorflow1_compat.tree import SourceTree

__all__ = ["decide", "enter", "is_decided", "switch_v2_off"]

_is_decided = False


def decide() -> None:
    """Notes that the launcher has determined the script's version, so that no other code examines it."""
    global _is_decided
    _is_decided = True


def is_decided() -> bool:
    """Returns whether `decide` was called in this process."""
    return _is_decided


def enter(
    roots: Sequence[str], known_paths: Sequence[str] | None = None, era: int = 1, older: Iterable[str] = ()
) -> SourceTree:
    """Prepares this process for a script of TensorFlow 1, or one with old names of 2; TensorFlow is not imported yet.

    Args:
      roots: the user's source tree.
      known_paths: see `SourceTree`.
      era: 1 or 2.
      older: for era 2, the packages whose older names the script needs (`Evidence.older`).
    Returns:
      The tree.
    """
    decide()
    tree = SourceTree(roots, known_paths)
    proxies.serve(tree, OF_1 if era == 1 else tables_of(older))
    tree.watch(UserLoader, UserExtensionLoader)
    spawn.follow(tree, (era, sorted(older)), _prepare_child)
    if era == 2:
        old_attributes.add_attributes_of_2()
        return tree
    if "tensorflow" in sys.modules:
        _begin()
    else:
        after_import("tensorflow", lambda module: _begin())
    return tree


def _begin() -> None:
    switch_v2_off()
    load_generated_code_with(UserLoader)


def _prepare_child(
    path: str, roots: list[str], known_paths: list[str], sees: tuple[int, list[str]], search_path: list[str]
) -> str:
    """Prepares a spawned child when it reads its parent's data, before it loads the script."""
    sys.path[:] = search_path
    journal.silence()  # the parent has printed it
    enter(roots, known_paths, *sees)
    spawn.load_main_of_parent()
    return path


def switch_v2_off() -> None:
    """Sets TensorFlow 1.15's defaults: graphs, plain variables, shapes and epsilons, sizes like `64 / 2`."""
    import tensorflow.compat.v1 as tf

    # One of the switches warns about its removal, which a script of TensorFlow 1 need not know. Only this logger's own
    # level changes, usually unset, so that a script's level for all loggers still applies.
    logger = tf.get_logger()
    level = logger.level
    logger.setLevel("ERROR")
    try:
        tf.disable_v2_behavior()
        accept_whole_floats()
        add_larger_epsilons()
        set_deterministic(False)  # TF_DETERMINISTIC_OPS, unknown to 1.15, refuses random operators without a seed
        old_attributes.add_attributes()
    finally:
        logger.setLevel(level)
