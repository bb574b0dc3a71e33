"""TensorFlow, at the moment it is loaded: the right version, and without its greetings.

What is not shown: TensorFlow's notes about its own build, its advice to leave TF 1 interfaces, and the closing notice
of tensorflow-addons. Warnings and errors stay, and so does whatever the script logs. `NPU_BRIDGE_VERBOSE=1` shows all.
"""

from __future__ import annotations

import contextlib
import importlib.abc
import logging
import sys
import types
import warnings
from collections.abc import Iterator
from typing import Any

from npu_bridge.base.after_import import after_import, importer
from npu_bridge.base.install import INSTALL_TENSORFLOW, TENSORFLOW

__all__ = ["watch"]

_OURS = ("npu_bridge", "hccl", "tensorflow1_compat")
# What runs without TensorFlow, and beside any version of it.
_INDEPENDENT = ("npu_bridge.base", "npu_bridge.launch", "npu_bridge.options")
_INDEPENDENT += ("npu_bridge.reporting.compare", "npu_bridge.run")
_ADVICE = ("Instructions for updating:", "The name %s is deprecated")
_LEVEL = "TF_CPP_MIN_LOG_LEVEL"


def watch() -> None:
    """Sees to TensorFlow now if this process has loaded it, else when it does.

    Imports of this package fail with one sentence where TensorFlow is missing or of another version; other modules may
    import whatever there is.
    """
    if "tensorflow" in sys.modules:
        _see_to(sys.modules["tensorflow"])
    else:
        after_import("tensorflow", _see_to, _without_notes, _explain_absence)


def _see_to(tensorflow: types.ModuleType) -> None:
    found = str(getattr(tensorflow, "__version__", "unknown"))
    if not found.startswith(f"{TENSORFLOW}."):
        text = f"npu_bridge: TensorFlow is of another version. Expected {TENSORFLOW}; got {found}. {INSTALL_TENSORFLOW}"
        sys.meta_path.insert(0, _Refusal(text))
        if _is_ours(importer()):
            raise ImportError(text, name="tensorflow")
    elif not _is_verbose():
        logging.getLogger("tensorflow").addFilter(_is_no_advice)
        # After the script's own filters, which decide first.
        closing_notice = r"\s*TensorFlow Addons \(TFA\) has ended"
        warnings.filterwarnings("ignore", closing_notice, UserWarning, append=True)


@contextlib.contextmanager
def _without_notes() -> Iterator[None]:
    """TensorFlow reads the level of its C++ messages once, while it is loaded."""
    from npu_bridge.base import environment

    level = {} if _is_verbose() or environment.read_variable(_LEVEL) else {_LEVEL: "1"}
    with environment.temporarily(lambda: level):
        yield


def _explain_absence() -> None:
    if _is_ours(importer()):
        text = f"npu_bridge: TensorFlow is not installed. Expected {TENSORFLOW}; got none. {INSTALL_TENSORFLOW}"
        raise ModuleNotFoundError(text, name="tensorflow")


def _is_no_advice(record: logging.LogRecord) -> bool:
    """False for what TensorFlow says about a name that it wants to retire, told by its template."""
    template = str(record.msg)
    return not (template.startswith("From %s: ") and any(advice in template for advice in _ADVICE))


def _is_verbose() -> bool:
    from npu_bridge.base import environment  # not earlier: importing the package alone loads nothing

    return environment.is_flag_on(environment.VERBOSE)


def _is_ours(name: str) -> bool:
    return name.split(".")[0] in _OURS


class _Refusal(importlib.abc.MetaPathFinder):
    """Refuses this package's modules beside a TensorFlow they are not made for."""

    def __init__(self, text: str):
        self._text = text

    def find_spec(self, name: str, path: Any, target: Any = None) -> None:
        if _is_ours(name) and name not in (*_OURS, "npu_bridge.reporting") and not name.startswith(_INDEPENDENT):
            raise ImportError(self._text, name="tensorflow")
