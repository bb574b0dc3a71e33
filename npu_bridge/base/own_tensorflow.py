"""Keeps TensorFlow's public functions as they were when this package was imported.

A script may write `tf.nn.dropout = npu_ops.dropout`. An operator that looked up `tf.nn.dropout` when it is called would
then call itself. So what computes here says `from npu_bridge.base.own_tensorflow import tf`.
"""

from __future__ import annotations

import types
from typing import Any

import tensorflow

__all__ = ["tf"]

_PUBLIC = ("tensorflow._api.", "tensorflow.compat")
# Others load Keras or Estimators as soon as anything is asked of them.
_LOADED = (types.ModuleType, type(tensorflow.compat.v1))
# Scripts do not replace raw operators. Version 2 is the same namespace again.
_LEFT_OUT = ("raw_ops", "v2")


class _Kept(types.ModuleType):
    """A namespace of TensorFlow with the values of now; Keras and others that load when they are used stay themselves.

    Args:
      module: the namespace.
      seen: those that were kept already.
    """

    def __init__(self, module: types.ModuleType, seen: dict[int, _Kept]):
        super().__init__(module.__name__)
        seen[id(module)] = self
        self._module = module
        for name, value in list(vars(module).items()):
            if name.startswith("_"):
                continue
            if type(value) in _LOADED and name not in _LEFT_OUT and value.__name__.startswith(_PUBLIC):
                value = seen.get(id(value)) or _Kept(value, seen)
            setattr(self, name, value)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._module, name)


tf: Any = _Kept(tensorflow, {})
