"""Provides `tf.estimator` for TensorFlow 2.16 and later, which has removed it.

The last version of the package tensorflow-estimator, 2.15, still works with TensorFlow 2.21. The package needs three
things that TensorFlow has removed: the names `tf.estimator` and `tf.compat.v1.estimator`; modules that ran Estimators
on several workers and on TPUs; and a third kind of exported names beside those of TensorFlow and of Keras.
"""

from __future__ import annotations

import importlib
import importlib.abc
import importlib.util
import sys
import types
from typing import Any

from npu_bridge.base.after_import import call_after_import

_COORDINATOR = "tensorflow.python.distribute.estimator_training"
# Code in these modules runs only on TPUs.
_OF_TPU = (
    "tensorflow.python.tpu.session_support",
    "tensorflow.python.tpu.tpu_embedding",
    "tensorflow.python.tpu.tpu_embedding_gradient",
)
_PACKAGE = "tensorflow_estimator.python.estimator.api"
# Names that scripts import -> names in the package.
_NAMES = {
    "tensorflow.estimator": f"{_PACKAGE}._v2.estimator",
    "tensorflow.compat.v1.estimator": f"{_PACKAGE}._v1.estimator",
    "tensorflow.compat.v2.estimator": f"{_PACKAGE}._v2.estimator",
    "tensorflow._api.v2.compat.v1.estimator": f"{_PACKAGE}._v1.estimator",
    "tensorflow._api.v2.compat.v2.estimator": f"{_PACKAGE}._v2.estimator",
}


def add_estimator_module(tensorflow: types.ModuleType) -> None:
    """Adds `tf.estimator`, which is loaded on first use."""
    sys.meta_path.append(_Finder())
    for module in (tensorflow, tensorflow.compat.v1, tensorflow.compat.v2):
        _add_estimator(module)
    for name in ("tensorflow.compat.v1", "tensorflow.compat.v2"):  # an import by this name loads the module again
        call_after_import(name, _add_estimator)


def _add_estimator(module: types.ModuleType) -> None:
    original = vars(module).get("__getattr__")

    def find(name: str) -> Any:
        if name == "estimator":
            return importlib.import_module(f"{module.__name__}.estimator")
        if original is not None:
            return original(name)
        raise AttributeError(f"module {module.__name__!r} has no attribute {name!r}")

    module.__getattr__ = find  # type: ignore[method-assign]


class _Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """A finder for removed modules; finds modules of `tf.estimator` in the package tensorflow-estimator."""

    def find_spec(self, name: str, path: Any, target: Any = None) -> importlib.machinery.ModuleSpec | None:
        is_known = name in (_COORDINATOR, *_OF_TPU) or _real_name(name)
        return importlib.util.spec_from_loader(name, self) if is_known else None

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> types.ModuleType | None:
        if not _real_name(spec.name):
            return None
        _allow_exports_by_estimators()
        return importlib.import_module(_real_name(spec.name))

    def exec_module(self, module: types.ModuleType) -> None:
        if module.__name__ == _COORDINATOR:
            module.should_run_distribute_coordinator = lambda config: False
            module.init_run_config = _init_run_config
        elif module.__name__ in _OF_TPU:
            module.__getattr__ = _tpu_placeholder


def _tpu_placeholder(name: str) -> type:
    if name.startswith("__"):
        raise AttributeError(name)
    return type(name, (_TpuPlaceholder,), {})


class _TpuPlaceholder:
    """A placeholder for a class or function that works only on TPUs."""

    def __init__(self, *arguments: Any, **keywords: Any):
        raise NotImplementedError(f"{type(self).__name__} needs a TPU, and TensorFlow 2.15.")


def _real_name(name: str) -> str:
    for above, real in _NAMES.items():
        if name == above or name.startswith(f"{above}."):
            return real + name[len(above) :]
    return ""


def _allow_exports_by_estimators() -> None:
    """Lets Estimators export names, which needs an entry in TensorFlow's tables (`util.tf_export.API_ATTRS`)."""
    from tensorflow.python.util import tf_export

    if not hasattr(tf_export, "ESTIMATOR_API_NAME"):
        tf_export.ESTIMATOR_API_NAME = "estimator"
        for table, version in ((tf_export.API_ATTRS, ""), (tf_export.API_ATTRS_V1, "_v1")):
            kind = type(table[tf_export.TENSORFLOW_API_NAME])
            table["estimator"] = kind(f"_estimator_api_names{version}", f"_estimator_api_constants{version}")


def _init_run_config(config: Any, cluster: dict[str, Any]) -> None:
    """Initialises the distribution settings of a RunConfig, for a process without other workers."""
    config._distribute_coordinator_mode = None
    given = config._experimental_distribute
    for name in ("train_distribute", "eval_distribute"):
        if given and getattr(given, name):
            setattr(config, f"_{name}", getattr(given, name))
    config._init_distributed_setting_from_environment_var(cluster)
    config._maybe_overwrite_session_config_for_distributed_training()
