"""Switches the user's files in a process to an older TensorFlow; all other code keeps the installed one."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence

from npu_bridge.base.after_import import call_after_import
from npu_bridge.base.tf_internals.contrib import (
    accept_whole_floats,
    load_generated_code_with,
    raise_batch_norm_epsilons,
)
from npu_bridge.base.tf_internals.sessions import set_deterministic
from tensorflow1_compat import journal, old_attributes, old_keras_rules, proxies, spawn
from tensorflow1_compat.extensions import UserExtensionLoader
from tensorflow1_compat.source import UserLoader
from tensorflow1_compat.tables import OF_1
from tensorflow1_compat.tables_of_2 import tables_of
from tensorflow1_compat.tree import SourceTree

__all__ = ["mark_script_version_as_known", "prepare_process", "is_script_version_known", "switch_v2_off"]

_is_script_version_known = False


def mark_script_version_as_known() -> None:
    """Records that the TensorFlow version of the script is known, so that `plain.py` does not examine the script."""
    global _is_script_version_known
    _is_script_version_known = True


def is_script_version_known() -> bool:
    """Returns whether `mark_script_version_as_known` was called in this process."""
    return _is_script_version_known


def prepare_process(
    roots: Sequence[str], known_paths: Sequence[str] | None = None, era: int = 1, older: Iterable[str] = ()
) -> SourceTree:
    """Prepares this process for a script of TensorFlow 1, or for a script with old names of TensorFlow 2.

    This function does not import TensorFlow.

    Args:
      roots: folders of the user's files.
      known_paths: see `SourceTree`.
      era: 1 or 2, for TensorFlow 1 or 2.
      older: for TensorFlow 2, the packages whose older names the script needs, as in `EraEvidence`.
    Returns:
      The user's source tree.
    """
    mark_script_version_as_known()
    tree = SourceTree(roots, known_paths)
    proxies.serve_proxies(tree, OF_1 if era == 1 else tables_of(older))
    tree.install_import_hook(UserLoader, UserExtensionLoader)
    spawn.prepare_spawned_children(tree, (era, sorted(older)), _prepare_child)
    if era == 2:
        old_attributes.add_attributes_of_2()
        return tree
    if "tensorflow" in sys.modules:
        _switch_to_version_1()
    else:
        call_after_import("tensorflow", lambda module: _switch_to_version_1())
    return tree


def _switch_to_version_1() -> None:
    switch_v2_off()
    load_generated_code_with(UserLoader)


def _prepare_child(
    path: str, roots: list[str], known_paths: list[str], description: tuple[int, list[str]], search_path: list[str]
) -> str:
    """Prepares a spawned child process while it unpickles its parent's data, before it loads the script."""
    sys.path[:] = search_path
    journal.stop_printing()  # the parent has printed it
    prepare_process(roots, known_paths, *description)
    spawn.load_main_of_parent()
    return path


def switch_v2_off() -> None:
    """Sets defaults of TensorFlow 1.15: graphs, reference variables, old shapes and epsilons, floats as sizes."""
    import tensorflow.compat.v1 as tf

    # One of the switches warns about its removal, which a script of TensorFlow 1 need not know. Only this logger's own
    # level changes, usually unset, so that a script's level for all loggers still applies.
    logger = tf.get_logger()
    level = logger.level
    logger.setLevel("ERROR")
    try:
        tf.disable_v2_behavior()
        accept_whole_floats()
        raise_batch_norm_epsilons()
        set_deterministic(False)  # TF_DETERMINISTIC_OPS, unknown to 1.15, refuses random operators without a seed
        old_attributes.add_attributes_of_1()
        old_keras_rules.restore_keras_of_1()
    finally:
        logger.setLevel(level)
