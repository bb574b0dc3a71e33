"""A script of TensorFlow 1 that is started with plain `python`: what can be mended from within, and the line if not."""

from __future__ import annotations

import os
import sys

from npu_bridge.tf1 import start
from npu_bridge.tf1.era import Evidence, evidence_of
from npu_bridge.tf1.journal import Place
from npu_bridge.tf1.missing import shortened
from npu_bridge.tf1.tree import SourceTree

__all__ = ["mend_main_script"]


def mend_main_script() -> None:
    """Switches version 2 off if the running script is one of TensorFlow 1 and nothing has run yet.

    What cannot be mended, because the script has its modules by now, is one line on standard error. Scripts started by
    `npu-run` are left alone.
    """
    path = getattr(sys.modules.get("__main__"), "__file__", None)
    if start.is_decided() or not path or not path.endswith(".py") or not os.path.isfile(path):
        return
    folder = os.path.dirname(os.path.realpath(path))
    if not SourceTree([folder]).holds(path):
        return
    evidence = evidence_of(path, [folder])
    if not evidence.is_tensorflow_1:
        return
    problem = _out_of_reach(evidence)
    if not _has_run():
        start.switch_v2_off()
    elif _is_eager():
        problem = problem or f"{Place(path, 1)}: TensorFlow has run eagerly before npu_bridge.npu_init was imported"
    if problem:
        print(f"npu_bridge: {problem}: start it with npu-run {os.path.relpath(path)}", file=sys.stderr)


def _out_of_reach(evidence: Evidence) -> str | None:
    """The first name that the script will not find."""
    for name, use in evidence.of_1.items():
        is_contrib = "contrib" in name.split(".")[:4]
        if not use.is_guarded and (is_contrib or name.startswith("tensorflow.") and ".compat." not in name):
            return f"{use.place}: TensorFlow 2.15 has no {shortened(name)}"
    return None


def _is_eager() -> bool:
    import tensorflow.compat.v1 as tf

    return tf.executing_eagerly()


def _has_run() -> bool:
    """Whether an operator has run or a graph has been begun, so that it is too late to change what a tensor is."""
    from tensorflow.python.eager import context
    from tensorflow.python.framework import ops

    if context.context_safe() is not None and context.context()._context_handle is not None:
        return True
    return bool(ops.get_default_graph().get_operations()) if not _is_eager() else False
