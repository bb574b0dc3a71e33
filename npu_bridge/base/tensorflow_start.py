"""Prepares TensorFlow when it is loaded: checks its version, and hides its greetings and false alarms.

Hides TensorFlow's notes about its own build, its advice to leave TF 1 interfaces, the closing notice of
tensorflow-addons, and two warnings where they are not true (`_FalseAlarmFilter`). Other warnings and errors, and all
log lines of the script, are shown. `NPU_BRIDGE_VERBOSE=1` shows everything.
"""

from __future__ import annotations

import contextlib
import functools
import importlib.abc
import logging
import os
import re
import sys
import tempfile
import types
import warnings
from collections.abc import Iterator
from typing import Any

from npu_bridge.base.after_import import call_after_import, importing_module_name
from npu_bridge.base.install import (
    INSTALL_TENSORFLOW,
    TENSORFLOWS,
    install_command,
    is_supported_tensorflow,
    numpy_problem,
)
from npu_bridge.base.terminal import escape_controls
from npu_bridge.base.tf_internals import functions, names

_OURS = ("npu_bridge", "npu_run", "hccl", "npu_device", "tensorflow1_compat")
# Packages that run without TensorFlow, and with any version of it.
_INDEPENDENT = ("npu_bridge.base", "npu_bridge.options", "npu_bridge.run", "npu_run")
_ADVICE = ("Instructions for updating:", "The name %s is deprecated")
# Warnings about `tf.layers`, cells, and methods of layers, twice for each call and on every rank.
_LAYER_ADVICE = r"`(tf\.layers|tf\.nn|layer)\.[\w.]+` (is deprecated|will be removed)"
_CLOSING_NOTICE = r"\s*TensorFlow Addons \(TFA\) has ended"
_STANDS_STILL = "It seems that global step"
_SLOW_CALLBACK = re.compile(r"Callback method `(\w+)` is slow .* time: ([\d.]+)s\)")
_SHORT_SECS = 0.01  # chosen here: compared with a shorter step, any callback is slow
_LEVEL = "TF_CPP_MIN_LOG_LEVEL"
_GREETING = re.compile(
    rb"WARNING: All log messages before absl::InitializeLog\(\)|I\d{4} .* (port|cpu_feature_guard)\.cc:\d+\]"
)
# TensorFlow builds for GPUs say this on a machine without a GPU driver, while they are loaded and at the first use.
_NO_DRIVER = re.compile(rb"[IE]\d{4} .* cud\w+\.cc:\d+\] (Could not find cuda drivers|failed call to cuInit)")
_KERAS_CHOICE = "TF_USE_LEGACY_KERAS"  # read while TensorFlow is loaded, and at the first use of `tf.keras`
_KERAS_2 = ("1", "true", "True")  # its values for Keras 2


def prepare_tensorflow() -> None:
    """Prepares TensorFlow: now if this process has loaded TensorFlow, else as soon as it does.

    If TensorFlow is missing or unsupported, imports of this package fail with one sentence. Other modules can still
    import any version of TensorFlow.
    """
    if "tensorflow" in sys.modules:
        _prepare_loaded_tensorflow(sys.modules["tensorflow"])
    else:
        call_after_import("tensorflow", _prepare_loaded_tensorflow, _silence_loading, _explain_missing_tensorflow)


def is_project_module(name: str) -> bool:
    """Returns whether the module of this name belongs to this project, and not to a script."""
    return name.split(".")[0] in _OURS


def hide_global_step_warning() -> None:
    """Hides TensorFlow's warning about a constant global step; this package gives its own warning."""
    _false_alarm_filter().step_is_explained = True


def _prepare_loaded_tensorflow(tensorflow: types.ModuleType) -> None:
    problem = _version_problem(str(getattr(tensorflow, "__version__", "unknown"))) or _keras_problem(tensorflow)
    if problem:
        sys.meta_path.insert(0, _RefusingFinder(problem))
        if is_project_module(importing_module_name()):
            raise ImportError(problem, name="tensorflow")
        return
    if not names.HAS_ESTIMATORS:
        from npu_bridge.base.tf_internals.estimators import add_estimator_module
        from npu_bridge.base.tf_internals.keras3 import redirect_to_keras_2

        _choose_keras_2()
        redirect_to_keras_2(tensorflow)
        add_estimator_module(tensorflow)
    functions.keep_from_autograph(_OURS)
    if not _is_verbose():
        logging.getLogger("tensorflow").addFilter(_is_not_advice)
        logging.getLogger("tensorflow").addFilter(_false_alarm_filter())
        # Appended after the script's own filters, which decide first.
        for notice in (_CLOSING_NOTICE, _LAYER_ADVICE):
            warnings.filterwarnings("ignore", notice, UserWarning, append=True)


def _version_problem(found_version: str) -> str:
    """Returns why this package does not work with a version of TensorFlow, and the cure; "" if it works."""
    if not is_supported_tensorflow(found_version):
        problem = f"npu_bridge: TensorFlow has an unsupported version. Expected {TENSORFLOWS}; got {found_version}."
        return f"{problem} {INSTALL_TENSORFLOW}"
    command = "" if names.HAS_ESTIMATORS else install_command(found_version)
    return command and (
        f"npu_bridge: TensorFlow {found_version} has no Estimator and no Keras 2 of its own. Install them: {command}"
    )


def _keras_problem(tensorflow: types.ModuleType) -> str:
    """Returns why `tf.keras` is not Keras 2, as this package needs, and the cure; "" if it is or can become Keras 2."""
    if names.HAS_ESTIMATORS:
        return ""
    from npu_bridge.base import environment
    from npu_bridge.base.tf_internals import keras3

    choice = environment.read_variable(_KERAS_CHOICE)
    if choice in (None, *_KERAS_2) and not keras3.is_tf_keras(tensorflow):
        return ""
    cause = "it was used before npu_bridge was imported" if choice is None else f"{_KERAS_CHOICE} is {choice!r}"
    return (
        f"npu_bridge: tf.keras is Keras 3, because {cause}. Expected Keras 2 as tf.keras; `import keras` "
        f"gives Keras 3. Import npu_bridge first, or set {_KERAS_CHOICE}=1."
    )


def _folder_name_problem(path: str) -> str:
    """Returns why TensorFlow cannot read its own path, which must be UTF-8, and the cure; "" if TensorFlow can."""
    with contextlib.suppress(UnicodeEncodeError):
        if path.encode() == os.fsencode(path):
            return ""
    folder = os.path.dirname(path)
    return (
        f"npu_bridge: the path of TensorFlow cannot be decoded. Expected ASCII, or UTF-8 in a UTF-8 locale; got "
        f"{escape_controls(folder)} in {sys.getfilesystemencoding()}. Set LC_ALL=C.UTF-8 and unset PYTHONUTF8, or "
        "install TensorFlow elsewhere."
    )


def _choose_keras_2() -> None:
    """Makes `tf.keras` Keras 2, unless the user has chosen a version of Keras."""
    from npu_bridge.base import environment

    if environment.read_variable(_KERAS_CHOICE) is None:
        environment.write_variable(_KERAS_CHOICE, 1)


@contextlib.contextmanager
def _silence_loading() -> Iterator[None]:
    """Sets the level of TensorFlow's C++ messages, which TensorFlow reads only once, during its import.

    From TensorFlow 2.16 on, the libraries print greetings before they read the level.
    """
    from npu_bridge.base import environment, gpus, inventory

    versions = [inventory.installed_version(name) for name in ("tensorflow", "numpy")]
    problem = numpy_problem(*versions) if all(versions) else ""
    if sys.platform == "linux" and not os.path.exists("/proc/self/exe"):
        problem = (
            "npu_bridge: TensorFlow crashes without /proc. Expected a mounted /proc; got none. Run mount -t proc proc "
            "/proc"
        )
    problem = problem or _folder_name_problem(getattr(sys.modules["tensorflow"], "__file__", None) or "")
    if problem:
        raise ImportError(problem, name="tensorflow")
    if not names.HAS_ESTIMATORS:
        _choose_keras_2()  # before the import, which decides what `from tensorflow.keras.layers import Dense` finds
    given = "0" if _is_verbose() else environment.read_variable(_LEVEL)
    level = {} if given else {_LEVEL: "1"}
    with environment.set_variables_temporarily(lambda: level):
        if given == "0" or names.HAS_ESTIMATORS:
            yield
        elif gpus.can_use_gpus():
            with _hide_stderr_lines(_GREETING):
                yield
        else:
            from npu_bridge.base.tf_internals import sessions

            with _hide_stderr_lines(_GREETING, _NO_DRIVER):
                yield
                with contextlib.suppress(ImportError):  # another version, which is refused afterwards
                    sessions.find_devices()  # here, and not at the first use, where its messages would be shown


@contextlib.contextmanager
def _hide_stderr_lines(*hidden: re.Pattern[bytes]) -> Iterator[None]:
    """Buffers this process's standard error, also from C++, and passes on all lines but those of these patterns."""
    with contextlib.ExitStack() as stack:
        try:
            said = stack.enter_context(tempfile.TemporaryFile())
            original = os.dup(2)
        except OSError:  # no disk has room for a temporary file, or standard error is closed
            yield
            return
        os.dup2(said.fileno(), 2)
        try:
            yield
        finally:
            os.dup2(original, 2)
            os.close(original)
            said.seek(0)
            with contextlib.suppress(OSError):  # a full disk, or a reader that is gone, does not make the import fail
                for line in said:
                    if not any(pattern.match(line) for pattern in hidden):
                        os.write(2, line)


def _explain_missing_tensorflow() -> None:
    if is_project_module(importing_module_name()):
        text = f"npu_bridge: TensorFlow is not installed. Expected {TENSORFLOWS}; got none. {INSTALL_TENSORFLOW}"
        raise ModuleNotFoundError(text, name="tensorflow")


def _is_not_advice(record: logging.LogRecord) -> bool:
    """Returns False for TensorFlow's advice about a deprecated name, recognised by the message's template."""
    template = str(record.msg)
    return not (template.startswith("From %s: ") and any(advice in template for advice in _ADVICE))


def _is_verbose() -> bool:
    from npu_bridge.base import environment  # imported late: importing the package alone loads nothing

    return environment.is_flag_on(environment.VERBOSE)


@functools.cache
def _false_alarm_filter() -> _FalseAlarmFilter:
    return _FalseAlarmFilter()


class _FalseAlarmFilter(logging.Filter):
    """A filter that hides two warnings of TensorFlow and Keras where they are false or repeated.

    The first says that the global step stands still; a skipped step rightly does not increase it. The second says that
    a callback is slow. Compared with the short steps of a small model every callback is slow, and the user cannot speed
    up a callback of this package that waits for other ranks.
    """

    step_is_explained = False

    def filter(self, record: logging.LogRecord) -> bool:
        text = str(record.msg)
        if text.startswith(_STANDS_STILL):
            was_explained, self.step_is_explained = self.step_is_explained, True
            return not was_explained
        slow = _SLOW_CALLBACK.match(text)
        return slow is None or (float(slow[2]) > _SHORT_SECS and _is_users_callback(slow[1]))


def _is_users_callback(method: str) -> bool:
    """Returns whether a running callback defines this method outside of Keras and of this package."""
    keras = sys.modules["tensorflow"].keras
    frame = sys._getframe(1)
    while frame is not None and not isinstance(frame.f_locals.get("self"), keras.callbacks.CallbackList):
        frame = frame.f_back
    if frame is None:
        return True
    known = (*_OURS, "keras", "tf_keras", "horovod")
    methods = (method, method.replace("train_", ""))  # the second name is the one in older scripts
    for kind in map(type, frame.f_locals["self"].callbacks):
        makers = [base for base in kind.__mro__ if any(name in vars(base) for name in methods)]
        if makers and makers[0].__module__.split(".")[0] not in known:
            return True
    return False


class _RefusingFinder(importlib.abc.MetaPathFinder):
    """A finder that refuses this package's modules if TensorFlow is unsupported."""

    def __init__(self, text: str):
        self._text = text

    def find_spec(self, name: str, path: Any, target: Any = None) -> None:
        if (
            is_project_module(name)
            and name not in (*_OURS, "npu_bridge.reporting")
            and not name.startswith(_INDEPENDENT)
        ):
            raise ImportError(self._text, name="tensorflow")
