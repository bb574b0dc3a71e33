"""Helps scripts started with plain `python`: fixes what is still possible, and reports names that need `npu-run`."""

from __future__ import annotations

import os
import sys

from npu_bridge.base.terminal import echo, path_for_message
from npu_bridge.base.tf_internals.sessions import has_eager_context
from tensorflow1_compat import start
from tensorflow1_compat.era import EraEvidence, find_evidence_of_script
from tensorflow1_compat.journal import SourcePlace
from tensorflow1_compat.missing import shorten_name
from tensorflow1_compat.tree import SourceTree

__all__ = ["switch_main_script_to_tensorflow_1", "fix_old_names"]


def switch_main_script_to_tensorflow_1() -> None:
    """Switches to TensorFlow 1 behaviour if the running script is written for TensorFlow 1 and no operator has run yet.

    Prints a line to standard error if the script has a problem that only `npu-run` can fix. Has no effect in scripts
    started by `npu-run`.
    """
    path = _main_script()
    evidence = find_evidence_of_script(path, [os.path.dirname(path)]) if path else None
    if evidence is None or not evidence.is_tensorflow_1:
        return
    problem = _describe_unreachable_name(evidence)
    if not _is_too_late_for_tensorflow_1():
        start.switch_v2_off()
    elif _is_eager():
        problem = (
            problem or f"{SourcePlace(path, 1)}: TensorFlow has run eagerly before npu_bridge.npu_init was imported"
        )
    if problem:
        echo(f"npu_bridge: {problem}: start it with npu-run {path_for_message(path)}", err=True)


def fix_old_names() -> None:
    """Makes the modules of a TensorFlow 2 script find names of earlier TensorFlow 2, if the script uses such names.

    The main script itself is already compiled, so it finds old names only under `npu-run`.
    """
    path = _main_script()
    if path:
        evidence = find_evidence_of_script(path, [os.path.dirname(path)])
        if evidence.old_of_2 and not evidence.is_tensorflow_1:
            start.prepare_process([os.path.dirname(path)], era=2, older=evidence.packages_needed_in_older_version)


def _main_script() -> str | None:
    """Returns the real path of the running script if it belongs to the user and is not examined yet; else None."""
    path = getattr(sys.modules.get("__main__"), "__file__", None)
    if start.is_script_version_known() or not path or not path.endswith(".py") or not os.path.isfile(path):
        return None
    path = os.path.realpath(path)
    return path if SourceTree([os.path.dirname(path)]).contains_file(path) else None


def _describe_unreachable_name(evidence: EraEvidence) -> str | None:
    """Returns a message about the first name that the script will not find; None if it will find all names."""
    for name, use in evidence.of_1.items():
        is_contrib = "contrib" in name.split(".")[:4]
        if not use.is_guarded and (is_contrib or name.startswith("tensorflow.") and ".compat." not in name):
            return f"{use.place}: TensorFlow 2.15 has no {shorten_name(name)}"
    return None


def _is_eager() -> bool:
    import tensorflow.compat.v1 as tf

    return tf.executing_eagerly()


def _is_too_late_for_tensorflow_1() -> bool:
    """Returns whether an operator has run or a graph has operators: then it is too late to switch to TensorFlow 1."""
    import tensorflow.compat.v1 as tf

    if has_eager_context():
        return True
    return bool(tf.get_default_graph().get_operations()) if not _is_eager() else False
